"""A profiler's trace becomes microseconds by kernel name: of a GPU's streams alone, read from a
trace that is written down here."""

from __future__ import annotations

import jax

from benchmarks.gpu.trace import KernelTime, kernel_times

# picoseconds; a line of modules and a host's line hold the same time again
SPACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "decode_attention" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_12" } }
  event_metadata { key: 3 value { id: 3 name: "loop_add_fusion_3" } }
  lines { name: "Stream #14(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 5000000 }
    events { metadata_id: 2 offset_ps: 6000000 duration_ps: 2000000 }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 7000000 } }
  lines { name: "Stream #15(MemcpyD2D)"
    events { metadata_id: 3 offset_ps: 0 duration_ps: 1000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000 } }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "decode_attention" } }
  lines { name: "tf_XLAPjRtCpuClient/1"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 80000000 } }
}
"""


def test_streams_of_a_gpu_are_added_up_by_name():
    planes = jax.profiler.ProfileData.from_text_proto(SPACE).planes
    assert kernel_times(planes) == (
        KernelTime("decode_attention", 2, 12.0),
        KernelTime("loop_add_fusion", 2, 3.0),
    )
