"""A whole request on a CPU, by kvq and by others: `python -m benchmarks.cpu.request`.

plan.py               the measurements that a run makes
child.py              what a process that measures is told, and what it answers; standard library
with_kvq.py           measures kvq
with_llama_cpp.py     measures llama.cpp
with_transformers.py  measures transformers on torch
with_onnx.py          measures ONNX Runtime's attention of one layer
random_file.py        a GGUF file with random weights of a published model's shapes
report.py             the JSON file and its page
__main__.py           the command
"""
