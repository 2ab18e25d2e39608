"""One small run of `kvq report`, for tests."""

from kvq_tools.cli import main

TEXT = (
    "It is a truth universally acknowledged, that the key of the cat is seven, and the key of the"
    " dog is four. " * 3
)
CACHES = ("kivi:bits=2,recent=8,block=8,group_size=8", "int4")
WINDOW, STRIDE, SAMPLE, CONTEXT, STEPS = 32, 16, 24, 32, 2
RUN = ("--window", WINDOW, "--stride", STRIDE, "--limit", 64, "--mode", "fake", "--buckets", 4)


def call(*arguments):
    return main.main([str(a) for a in arguments])
