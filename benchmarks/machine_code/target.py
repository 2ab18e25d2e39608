"""The GPUs that kernels are compiled for: what XLA must know of them, and how many instructions
their memory leaves time for."""

from __future__ import annotations

import dataclasses

WARPS_PER_SM = 64
BLOCKS_PER_SM = 32
REGISTERS_PER_SM = 65536
LANES_PER_SM = 128  # four schedulers, each issues one instruction for 32 lanes in a cycle
# The share of issue slots that attention fills with two warps on a scheduler. Profiled on an H200:
# 0.57 (kivi:bits=4 by Triton), 0.53 (kivi:bits=2 on Mosaic GPU), 0.50 (nf4), less with bank
# conflicts.
ISSUED = 0.53
SHARED_BYTES_OF_A_BLOCK = 1024  # what the system keeps in shared memory for each resident block


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU. Clocks are in GHz, memory in bytes, bandwidths in bytes/s.

    sustained_clock: clock under load, for the budget.
    boost_clock: clock that the driver reports, for XLA.
    copy_bandwidth: bandwidth that a copy reaches, the limit for kernels.
    """

    name: str
    device_kind: str
    capability: tuple[int, int]
    architecture: str
    cores: int
    sustained_clock: float
    boost_clock: float
    shared_bytes_per_sm: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    copy_bandwidth: float

    def budget(self, stored_bits: float) -> float:
        """Return the instructions per cached element that can be issued while memory delivers its
        `stored_bits` bits."""
        issued = self.cores * LANES_PER_SM * self.sustained_clock * 1e9
        return issued / (self.copy_bandwidth * 8 / stored_bits)

    def warps_per_sm(self, registers: int, threads: int, shared_bytes: int) -> int:
        """Return the number of warps resident on a multiprocessor at once, for a kernel with blocks
        of `threads` threads."""
        warps = -(-threads // 32)
        registers_of_a_warp = -(-max(registers, 1) // 8) * 8 * 32
        by_registers = REGISTERS_PER_SM // registers_of_a_warp // warps
        by_shared = self.shared_bytes_per_sm // (shared_bytes + SHARED_BYTES_OF_A_BLOCK)
        return min(BLOCKS_PER_SM, WARPS_PER_SM // warps, by_registers, by_shared) * warps

    @property
    def config(self) -> str:
        """Return the `target_config` of jax.experimental.topologies: XLA's GpuTargetConfigProto as
        text."""
        major, minor = self.capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_bytes_per_sm,
            "shared_memory_per_block_optin": self.shared_bytes_per_sm - SHARED_BYTES_OF_A_BLOCK,
            "threads_per_core_limit": WARPS_PER_SM * 32,
            "core_count": self.cores,
            "fpus_per_core": 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": round(self.bandwidth),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.boost_clock,
            "device_memory_size": self.memory_bytes,
            "registers_per_core_limit": REGISTERS_PER_SM,
            "registers_per_block_limit": REGISTERS_PER_SM,
        }
        fields = " ".join(f"{key}: {value}" for key, value in device.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor}"
            " } } "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }'
            f' device_description_str: "{self.device_kind}"'
        )


H200 = Target(
    name="h200",
    device_kind="NVIDIA H200",
    capability=(9, 0),
    architecture="sm_90a",
    cores=132,
    sustained_clock=1.755,
    boost_clock=1.98,
    shared_bytes_per_sm=233472,
    l2_bytes=62914560,
    memory_bytes=150754820096,
    bandwidth=4.81404e12,
    copy_bandwidth=4.3e12,  # measured
)
A100 = Target(
    name="a100",
    device_kind="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    architecture="sm_80",
    cores=108,
    sustained_clock=1.41,
    boost_clock=1.41,
    shared_bytes_per_sm=167936,
    l2_bytes=41943040,
    memory_bytes=42505273344,
    bandwidth=1.5552e12,
    copy_bandwidth=1.39e12,  # not measured: the H200's share of the nominal bandwidth
)
# Kernels are compiled for these two, without limits: clocks and bandwidths are the makers' figures.
L40 = Target(
    name="l40",
    # from 0.11 on JAX compiles for GPUs that are not there by their names, and does not know an
    # L40S's
    device_kind="NVIDIA L40",
    capability=(8, 9),
    architecture="sm_89",
    cores=142,
    sustained_clock=2.49,
    boost_clock=2.49,
    shared_bytes_per_sm=102400,
    l2_bytes=100663296,
    memory_bytes=47810936832,
    bandwidth=8.64e11,
    copy_bandwidth=7.7e11,
)
B200 = Target(
    name="b200",
    device_kind="NVIDIA B200",
    capability=(10, 0),
    architecture="sm_100a",
    cores=148,
    sustained_clock=1.965,
    boost_clock=1.965,
    shared_bytes_per_sm=233472,
    l2_bytes=132644864,
    memory_bytes=191503138816,
    bandwidth=8e12,
    copy_bandwidth=7.1e12,
)
TARGETS = {target.name: target for target in (H200, A100)}
ARCHITECTURES = (A100, L40, H200, B200)  # one of each that kernels are for
BY_NAME = {target.name: target for target in ARCHITECTURES}
