"""The one table of methods that drives every property test: a new method, or a new mode of one, is
a new row here."""

from __future__ import annotations

import dataclasses
import re

import pytest


@dataclasses.dataclass(frozen=True)
class MethodCase:
    """A spec and what was measured for it.

    spec: windows are small, so that a short sequence fills all three regions.
    body_bits: stored bits of one body element at 2 KV heads of 64 channels
    (`kvq.size.body_bits_per_element`). Exact.
    attention_error: relative error of attention through this cache against attention over
    full-precision rows (test_method_error.py, which prints what it measured). A pin, not a goal: a
    change in either direction is a change of the method.
    roundtrip_error: relative error of keys and of values that the body gives back, at most.
    same_codes_in_decode: False where a method codes generated tokens differently from prompt tokens
    on purpose.
    """

    id: str
    spec: str
    body_bits: float
    attention_error: float
    same_codes_in_decode: bool = True
    roundtrip_error: float = 0.6


METHOD_CASES = (
    MethodCase("dense", "dense:sink=2,recent=5,block=8", 16.0, 0.0),
    MethodCase("kivi2", "kivi:sink=0,recent=12,block=16", 3.5, 0.4306),
    MethodCase("kivi4_group8", "kivi:bits=4,group_size=8,sink=3,recent=5,block=8", 8.0, 0.03961),
    MethodCase(
        "kivi3_k8_pre_rope",
        "k=kivi:bits=8,pre_rope=true,scale_dtype=float32"
        "+v=kivi:bits=3,scale_dtype=float32+cache:sink=0,recent=0,block=16",
        8.5,
        0.1693,
    ),
    MethodCase("innerq2", "innerq:sink=4,recent=8,block=16", 4.5, 0.1906),
    MethodCase("innerq3_sym", "innerq:bits=3,mode=sym,sink=0,recent=8,block=16", 4.75, 0.1255),
    MethodCase(
        "innerq2_asym_plain",
        "innerq:mode=asym,normalize=false,scale_dtype=bfloat16,sink=4,recent=3,block=8",
        4.5,
        0.4042,
    ),
    MethodCase(
        "innerq2_hybrid_prefill",
        "innerq:mode=hybrid_prefill,sink=4,recent=8,block=16",
        4.5,
        0.1906,
        same_codes_in_decode=False,
    ),
    MethodCase("innerq2_slot", "innerq:storage=slot,sink=4,recent=8,block=16", 4.296875, 0.1906),
    MethodCase(
        "innerq3_slot_hybrid_prefill",
        "innerq:bits=3,mode=hybrid_prefill,storage=slot,group_size=4,normalize=false,sink=4,recent=8,block=12",
        15.375,
        0.0656,
        same_codes_in_decode=False,
    ),
    MethodCase(
        "mixed",
        "k=innerq:bits=4,group_size=8+v=kivi:bits=2+cache:sink=1,recent=8,block=16",
        6.0,
        0.3502,
    ),
    MethodCase("int4", "int4:sink=2,recent=4,block=8", 4.25, 0.1521),
    MethodCase(
        "int3_group16_pre_rope",
        "int3:group_size=16,pre_rope=true,scale_dtype=bfloat16,recent=3,block=16",
        5.0,
        0.2629,
    ),
    MethodCase("nf4_two_heads", "nf4:group_size=64,sink=1,block=16", 4.5, 0.1468),
    MethodCase("nf2_group8", "nf2:group_size=8,recent=8,block=8", 6.0, 0.4108),
    MethodCase("kvquant4", "kvquant:outliers=0.04,sink=5,block=16", 6.58203125, 0.0353),
    MethodCase(
        "kvquant2_plain",
        "kvquant:bits=2,outliers=0,qnorm=true,sink=5,recent=5,block=16",
        2.125,
        0.1795,
    ),
    MethodCase(
        "kvquant3_matrix",
        "kvquant:bits=3,outliers=0.1,slots=1,thresholds=matrix,pre_rope=false,scale_dtype=float32,sink=5,block=8",
        8.546875,
        0.0549,
    ),
    MethodCase(
        "kvquant3_other_axes",
        "kvquant:bits=3,outliers=0.05,k_axis=token,v_axis=channel,weighting=none,sink=5,block=16",
        6.39453125,
        0.0688,
    ),
    MethodCase(
        "kvquant3_online",
        "kvquant:bits=3,outliers=0.04,channel_ranges=prompt,sink=5,recent=3,block=16",
        5.58203125,
        0.07,
    ),
    MethodCase(
        "kvquant2_nf_keys",
        "k=kvquant:bits=2,datatype=nf,outliers=0.02+v=int2+cache:sink=5,recent=0,block=16",
        3.26171875,
        0.2717,
    ),
    MethodCase("squat2", "squat:rank=3,lam=0.01,sink=0,recent=12,block=16", 3.5, 0.433),
    MethodCase(
        "squat3_pre",
        "squat_pre:bits=3,rank=6,block_channels=12,scale_dtype=float32,sink=2,recent=5,block=8",
        8.0,
        0.152,
    ),
    MethodCase("polar44", "polarquant:group_size=16,sink=2,recent=3", 11.0, 0.1121),
    MethodCase(
        "polar44_sqrt", "polarquant:radius_scale=sqrt,group_size=16,sink=2,recent=3", 11.0, 0.1212
    ),
    MethodCase(
        "polar42_fixed",
        "polarquant:angle_bits=4,radius_bits=2,group_size=8,cut=fixed,sink=1,block=16",
        11.5,
        0.1993,
    ),
    MethodCase(
        "polar32_kivi",
        "k=polarquant:angle_bits=3,radius_bits=2,group_size=16+v=kivi:bits=4+cache:sink=0,recent=4,block=16",
        4.75,
        0.3327,
    ),
    MethodCase(
        "polar_global",
        "k=polarquant:angle_bits=5,grid=global+v=innerq:bits=2+cache:sink=0,recent=8,block=16",
        4.75,
        0.2139,
    ),
    MethodCase("waterfill", "waterfill:bits=3,sink=5,recent=3,block=16", 3.0, 0.1546),
    MethodCase(
        "waterfill_widths",
        "waterfill:k_widths=8620@0/5432,v_widths=7641,sink=5,recent=3,block=8",
        5.75,
        0.128,
    ),
    MethodCase(
        "waterfill_values", "k=dense+v=waterfill:bits=2+cache:sink=5,recent=4,block=16", 9.0, 0.2054
    ),
    MethodCase("xquant4", "xquant:sink=2,recent=3,block=16", 5.125, 0.0875),
    MethodCase(
        "xquant3_outlier",
        "k=xquant:bits=4,group_size=8,exact_outlier_channel=true"
        "+v=xquant:bits=3,group_size=8+cache:sink=1,block=16",
        7.5625,
        0.1036,
    ),
    MethodCase(
        "xquant8_x", "xquant:bits=8,latent=false,scale_dtype=float32,recent=5,block=8", 8.5, 0.0224
    ),
    MethodCase("xquant_cl2", "xquant_cl:base_layer=0,sink=2,recent=3,block=16", 3.25, 0.2003),
    MethodCase(
        "xquant_cl3_x", "xquant_cl:base_layer=0,bits=3,latent=false,recent=5,block=8", 3.75, 0.0853
    ),
    MethodCase("xquant_cl_base", "xquant_cl:base_layer=1,group_size=16,sink=5", 6.0, 0.05),
    MethodCase(
        "innerq2_no_bias", "innerq:sink=4,recent=8,block=16,subtract_bias=true", 4.5, 0.1929
    ),
    MethodCase(
        "kivi3_pre_rope_no_bias",
        "kivi:bits=3,pre_rope=true,recent=5,block=16,subtract_bias=true",
        4.5,
        0.2005,
    ),
    MethodCase("nvfp4", "nvfp4:sink=2,recent=3,block=8", 4.5, 0.1327),
    MethodCase("nvfp4_plain", "nvfp4:scale=none,recent=3,block=16", 4.5, 0.1597),
    MethodCase("mxfp4", "mxfp4:sink=1,block=16", 4.25, 0.1915),
    MethodCase("mxfp4_pre_rope", "mxfp4:pre_rope=true,recent=3,block=8", 4.25, 0.2028),
    MethodCase("fp8", "fp8:recent=5,block=8", 8.0, 0.04092),
    MethodCase("fp8_head", "fp8:scale=head,pre_rope=true,sink=2,block=8", 8.0, 0.03963),
    MethodCase("int4_rotated", "int4:rotate=true,sink=2,recent=4,block=8", 4.25, 0.1213),
    MethodCase(
        "kivi3_rotated_pre_rope",
        "kivi:bits=3,pre_rope=true,rotate=true,recent=5,block=16",
        4.5,
        0.2165,
    ),
    MethodCase(
        "innerq2_rotated_values",
        "k=kivi:bits=4+v=innerq:bits=2,rotate=true+cache:sink=0,recent=8,block=16",
        5.5,
        0.2025,
    ),
    MethodCase(
        "kvquant3_rotated",
        "kvquant:bits=3,outliers=0.04,rotate=true,sink=5,block=16",
        5.58203125,
        0.0696,
    ),
    MethodCase(
        "squat2_rotated_no_bias",
        "squat:rank=3,rotate=true,sink=0,recent=12,block=16,subtract_bias=true",
        3.5,
        0.5182,
    ),
    MethodCase("turboquant3", "turboquant:sink=2,recent=3,block=8", 3.25, 0.2732),
    MethodCase(
        "turboquant2_pre_rope",
        "k=turboquant:bits=2,pre_rope=true,scale_dtype=float32"
        "+v=turboquant:bits=4,scale_dtype=float32+cache:recent=3,block=16",
        3.5,
        0.4937,
    ),
    MethodCase("kvarn2", "kvarn:group_size=16,sink=2,recent=3,block=16", 3.875, 0.5632),
    MethodCase(
        "kvarn42_floor",
        "k=kvarn:bits=4,group_size=8+v=kvarn:bits=2,group_size=8,floor=0.741,scale_dtype=float32"
        "+cache:sink=0,recent=3,block=8",
        7.625,
        0.4057,
    ),
    MethodCase("oscar_omni2", "oscar_omni:group_size=16,sink=1,recent=3,block=16", 4.0625, 0.5292),
    MethodCase("oscar_spectral2", "oscar_spectral:sink=5,recent=3,block=16", 2.5, 0.227),
    MethodCase(
        "pq_tables",
        "pq:pre_rope=false,code_bits=6,group_size=4,sink=5,recent=3,block=16",
        1.5,
        0.214,
    ),
    MethodCase(
        "pq_before_rope",
        "k=pq:group_size=4+v=pq:code_bits=4,group_size=4+cache:sink=5,recent=3,block=8",
        1.5,
        0.2462,
    ),
    MethodCase("optr2", "optr:steps=1,sink=5,recent=3,block=16", 2.5, 0.2128),
    MethodCase("block_gtq3", "block_gtq:sink=2,recent=3,block=16", 3.75, 0.281),
    MethodCase(
        "block_gtq_widths",
        "block_gtq:k_widths=43222111@0/8421,v_bits=2,scale_dtype=float32,recent=3,block=16",
        3.6875,
        0.4851,
    ),
    MethodCase("gear2", "gear:group_size=16,sink=2,recent=3", 8.765625, 0.205),
    MethodCase(
        "gear4_kcvt",
        "gear:backbone=kcvt,bits=4,rank=1,outliers=0,pre_rope=true,recent=5,block=8",
        8.375,
        0.09469,
    ),
    MethodCase(
        "gear3_outliers",
        "gear:bits=3,rank=0,outliers=0.1,scale_dtype=float32,group_size=8,sink=1,block=16",
        14.515625,
        0.07401,
    ),
    MethodCase("zipcache42", "zipcache:probes=8,sink=2,recent=3,block=16", 5.7578125, 0.1507),
    MethodCase(
        "zipcache83",
        "zipcache:salient_bits=8,other_bits=3,probes=4,unimportant_ratio=0.7,scale_dtype=float32,recent=5,block=24",
        8.5078125,
        0.08127,
    ),
    MethodCase(
        "values_only",
        "k=dense+v=innerq:bits=8,mode=sym+cache:sink=0,recent=4,block=16",
        13.0,
        0.002379,
    ),
)

EXHAUSTIVE = pytest.mark.exhaustive


def kind(spec: str) -> str:
    """Name the way in which a spec stores tokens: its method without bits, `k` for one on each
    side, or the option that changes rows. The formats of small floats are one way, and so are
    groups with a second scale. Rows in a calibrated rotation are stored as int4's are, and runs of
    channels of one width as waterfill's."""
    for option in ("subtract_bias", "rotate"):
        if option in spec:
            return option
    name = re.split("[:=]", spec)[0].rstrip("0123456789")
    alike = {"mxfp": "fp", "nvfp": "fp", "oscar_omni": "kvarn", "block_gtq": "waterfill"}
    alike |= dict.fromkeys(("oscar_spectral", "optr"), "int")
    return alike.get(name, name)


# The rows of every run, the first of each kind. The others are variants of these, and run with
# --exhaustive.
ONE_OF_EACH = tuple({kind(case.spec): case for case in reversed(METHOD_CASES)}.values())


def cases(*ids: str, every: bool = False, usual: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test over the table, or over the rows named. Of the table, rows outside
    ONE_OF_EACH run with --exhaustive alone; `every` takes all of them, for tests that are quick,
    and for the one that shows each row at work. Of the rows named, those outside `usual` do, where
    it is given.

    The scope puts all tests of a row in a file side by side, which share its compiled programs
    before they are dropped.
    """
    chosen = [
        pytest.param(
            case,
            marks=(
                ()
                if every or (case.id in (usual or ids) if ids else case in ONE_OF_EACH)
                else EXHAUSTIVE
            ),
            id=case.id,
        )
        for case in METHOD_CASES
        if not ids or case.id in ids
    ]
    return pytest.mark.parametrize("case", chosen, scope="module")
