"""The list of what a program launches, as XLA writes it: nested sections, loops that count as often
as they run, the longer branch."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.machine_code.thunks import of_a_layer, thunks

LIST = """\
001: kCustomKernel [source        | next=002 (1)] decode_attention \
grid: [16, 8, 8] threads: [32, 1, 1]  shared_memory: 22656 bytes
002: kCopy         [prev=001 (1)  | next=003 (1)] kCopy
003: kConditional  [prev=002 (1)  | next=004 (1)]
  false_branch:
    004: kCustomKernel [source       | next=005 (1)] loop_transpose_fusion \
grid: [1024, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
    005: kCustomKernel [prev=004 (1) | sink        ] quantize_asym_tokens \
grid: [16, 8, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
  true_branch:
    006: kCustomKernel [source       | sink        ] loop_broadcast_fusion_1 \
grid: [1024, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
007: kWhile        [prev=003 (1)  | next=008 (1)]
condition:
    008: kCustomKernel [source | sink] loop_compare_fusion \
grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    009: kCustomKernel [source       | next=010 (1)] loop_update_fusion_3 \
grid: [64, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
    010: kCustomKernel [prev=009 (1) | sink        ] loop_add_fusion \
grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
011: kCustomKernel [prev=007 (1)  | next=012 (1)] gemm_fusion_dot_34 \
grid: [3072, 1, 1] threads: [64, 1, 1]  shared_memory: 768 bytes
012: kCustomKernel [prev=011 (1)  | next=013 (1)] decode_attention \
grid: [16, 8, 8] threads: [32, 1, 1]  shared_memory: 22656 bytes
013: kCustomKernel [prev=012 (1)  | sink        ] decode_attention \
grid: [16, 8, 8] threads: [32, 1, 1]  shared_memory: 22656 bytes
"""


@pytest.mark.parametrize(("trips", "updates", "comparisons"), [(16, 16, 17)])
def test_a_loop_counts_as_often_as_it_runs_and_a_branch_as_its_longer_side(
    trips, updates, comparisons
):
    counts = Counter(name for thunk in thunks(LIST) for name in thunk.launches(trips))
    assert counts == {
        **{
            "decode_attention": 3,
            "kCopy": 1,
            "gemm_fusion_dot": 1,
            "loop_transpose_fusion": 1,
            "quantize_asym_tokens": 1,
        },
        **{
            "loop_update_fusion": updates,
            "loop_add_fusion": updates,
            "loop_compare_fusion": comparisons,
        },
    }


def test_a_layer_is_what_lies_between_two_attention_kernels_and_ends_with_one():
    top = thunks(LIST)
    assert of_a_layer(top) == top[-1:]
    with pytest.raises(ValueError, match="2 kernels of attention in 3 layers"):
        of_a_layer(top[1:])
    twice = [
        thunk
        for one in top
        for thunk in ([one, one] if one.name.startswith("decode_attention") else [one])
    ]
    assert of_a_layer(twice) == twice[-2:], "heads in two groups"


def test_a_thunk_of_an_unknown_kind_is_an_error_and_not_a_launch_fewer():
    (thunk,) = thunks("001: kSomethingNew [source | sink] name")
    with pytest.raises(ValueError, match="kSomethingNew"):
        list(thunk.launches(1))


def test_a_line_of_another_form_is_an_error_and_not_a_launch_fewer():
    with pytest.raises(ValueError, match="unknown form"):
        thunks(LIST.replace("012: kCustomKernel", "kCustomKernel"))
