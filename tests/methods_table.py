"""The one table of methods that drives every property test: a new method, or a new mode of one, is
a new row here."""

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
    same_codes_in_decode: False if a method codes generated tokens in another way than a prompt's.
    """

    id: str
    spec: str
    body_bits: float
    attention_error: float
    same_codes_in_decode: bool = True
    roundtrip_error: float = 0.6


# id, body_bits, attention_error, spec. A spec that does not fit stands below its row.
ROWS = """
dense                       16.0        0.0      dense:sink=2,recent=5,block=8
kivi2                       3.5         0.4306   kivi:sink=0,recent=12,block=16
kivi4_group8                8.0         0.03961  kivi:bits=4,group_size=8,sink=3,recent=5,block=8
kivi3_k8_pre_rope           8.5         0.1693
    k=kivi:bits=8,pre_rope=true,scale_dtype=float32+v=kivi:bits=3,scale_dtype=float32
    +cache:sink=0,recent=0,block=16
innerq2                     4.5         0.1906   innerq:sink=4,recent=8,block=16
innerq3_sym                 4.75        0.1255   innerq:bits=3,mode=sym,sink=0,recent=8,block=16
innerq2_asym_plain          4.5         0.4042
    innerq:mode=asym,normalize=false,scale_dtype=bfloat16,sink=4,recent=3,block=8
innerq2_hybrid_prefill      4.5         0.1906   innerq:mode=hybrid_prefill,sink=4,recent=8,block=16
innerq2_slot                4.296875    0.1906   innerq:storage=slot,sink=4,recent=8,block=16
innerq3_slot_hybrid_prefill 15.375      0.0656
    innerq:bits=3,mode=hybrid_prefill,storage=slot,group_size=4,normalize=false,sink=4,recent=8,
    block=12
mixed                       6.0         0.3502
    k=innerq:bits=4,group_size=8+v=kivi:bits=2+cache:sink=1,recent=8,block=16
int4                        4.25        0.1521   int4:sink=2,recent=4,block=8
int3_group16_pre_rope       5.0         0.2629
    int3:group_size=16,pre_rope=true,scale_dtype=bfloat16,recent=3,block=16
nf4_two_heads               4.5         0.1468   nf4:group_size=64,sink=1,block=16
nf2_group8                  6.0         0.4108   nf2:group_size=8,recent=8,block=8
kvquant4                    6.58203125  0.0353   kvquant:outliers=0.04,sink=5,block=16
kvquant2_plain              2.125       0.1795
    kvquant:bits=2,outliers=0,qnorm=true,sink=5,recent=5,block=16
kvquant3_matrix             8.546875    0.0549
    kvquant:bits=3,outliers=0.1,slots=1,thresholds=matrix,pre_rope=false,scale_dtype=float32,
    sink=5,block=8
kvquant3_other_axes         6.39453125  0.0688
    kvquant:bits=3,outliers=0.05,k_axis=token,v_axis=channel,weighting=none,sink=5,block=16
kvquant3_online             5.58203125  0.07
    kvquant:bits=3,outliers=0.04,channel_ranges=prompt,sink=5,recent=3,block=16
kvquant2_nf_keys            3.26171875  0.2717
    k=kvquant:bits=2,datatype=nf,outliers=0.02+v=int2+cache:sink=5,recent=0,block=16
squat2                      3.5         0.433    squat:rank=3,lam=0.01,sink=0,recent=12,block=16
squat3_pre                  8.0         0.152
    squat_pre:bits=3,rank=6,block_channels=12,scale_dtype=float32,sink=2,recent=5,block=8
polar44                     11.0        0.1121   polarquant:group_size=16,sink=2,recent=3
polar44_sqrt                11.0        0.1212
    polarquant:radius_scale=sqrt,group_size=16,sink=2,recent=3
polar42_fixed               11.5        0.1993
    polarquant:angle_bits=4,radius_bits=2,group_size=8,cut=fixed,sink=1,block=16
polar32_kivi                4.75        0.3327
    k=polarquant:angle_bits=3,radius_bits=2,group_size=16+v=kivi:bits=4
    +cache:sink=0,recent=4,block=16
polar_global                4.75        0.2139
    k=polarquant:angle_bits=5,grid=global+v=innerq:bits=2+cache:sink=0,recent=8,block=16
waterfill                   3.0         0.1546   waterfill:bits=3,sink=5,recent=3,block=16
waterfill_eigen             3.0         0.1546
    waterfill:bits=3,key_basis=eigen,sink=5,recent=3,block=16
waterfill_rotation          4.0         0.0766
    waterfill:bits=4,key_basis=eigen,value_basis=rotation,sink=5,recent=3,block=16
waterfill_widths            5.75        0.128
    waterfill:k_widths=8620@0/5432,v_widths=7641,sink=5,recent=3,block=8
waterfill_values            9.0         0.2054
    k=dense+v=waterfill:bits=2+cache:sink=5,recent=4,block=16
xquant4                     5.125       0.0875   xquant:sink=2,recent=3,block=16
xquant3_outlier             7.5625      0.1036
    k=xquant:bits=4,group_size=8,exact_outlier_channel=true+v=xquant:bits=3,group_size=8
    +cache:sink=1,block=16
xquant8_x                   8.5         0.0224
    xquant:bits=8,latent=false,scale_dtype=float32,recent=5,block=8
xquant_cl2                  3.25        0.2003   xquant_cl:base_layer=0,sink=2,recent=3,block=16
xquant_cl3_x                3.75        0.0853
    xquant_cl:base_layer=0,bits=3,latent=false,recent=5,block=8
xquant_cl_base              6.0         0.05     xquant_cl:base_layer=1,group_size=16,sink=5
squat2_rotated_no_bias      3.5         0.5182
    squat:rank=3,rotate=true,sink=0,recent=12,block=16,subtract_bias=true
innerq2_no_bias             4.5         0.1929   innerq:sink=4,recent=8,block=16,subtract_bias=true
kivi3_pre_rope_no_bias      4.5         0.2005
    kivi:bits=3,pre_rope=true,recent=5,block=16,subtract_bias=true
nvfp4                       4.5         0.1327   nvfp4:sink=2,recent=3,block=8
nvfp4_plain                 4.5         0.1597   nvfp4:scale=none,recent=3,block=16
mxfp4                       4.25        0.1915   mxfp4:sink=1,block=16
mxfp4_pre_rope              4.25        0.2028   mxfp4:pre_rope=true,recent=3,block=8
fp8                         8.0         0.04092  fp8:recent=5,block=8
fp8_head                    8.0         0.03963  fp8:scale=head,pre_rope=true,sink=2,block=8
int4_rotated                4.25        0.1213   int4:rotate=true,sink=2,recent=4,block=8
kivi3_rotated_pre_rope      4.5         0.2165
    kivi:bits=3,pre_rope=true,rotate=true,recent=5,block=16
innerq2_rotated_values      5.5         0.2025
    k=kivi:bits=4+v=innerq:bits=2,rotate=true+cache:sink=0,recent=8,block=16
kvquant3_rotated            5.58203125  0.0696
    kvquant:bits=3,outliers=0.04,rotate=true,sink=5,block=16
turboquant3                 3.25        0.2732   turboquant:sink=2,recent=3,block=8
turboquant2_pre_rope        3.5         0.4937
    k=turboquant:bits=2,pre_rope=true,scale_dtype=float32
    +v=turboquant:bits=4,scale_dtype=float32+cache:recent=3,block=16
kvarn2                      3.875       0.5632   kvarn:group_size=16,sink=2,recent=3,block=16
kvarn42_floor               7.625       0.4057
    k=kvarn:bits=4,group_size=8+v=kvarn:bits=2,group_size=8,floor=0.741,scale_dtype=float32
    +cache:sink=0,recent=3,block=8
oscar_omni2                 4.0625      0.5292   oscar_omni:group_size=16,sink=1,recent=3,block=16
oscar_spectral2             2.5         0.227    oscar_spectral:sink=5,recent=3,block=16
pq_tables                   1.5         0.214
    pq:pre_rope=false,code_bits=6,group_size=4,sink=5,recent=3,block=16
pq_before_rope              1.5         0.2462
    k=pq:group_size=4+v=pq:code_bits=4,group_size=4+cache:sink=5,recent=3,block=8
optr2                       2.5         0.2128   optr:steps=1,sink=5,recent=3,block=16
block_gtq3                  3.75        0.281    block_gtq:sink=2,recent=3,block=16
block_gtq_widths            3.6875      0.4851
    block_gtq:k_widths=43222111@0/8421,v_bits=2,scale_dtype=float32,recent=3,block=16
gear2                       8.765625    0.205    gear:group_size=16,sink=2,recent=3
gear4_kcvt                  8.375       0.09469
    gear:backbone=kcvt,bits=4,rank=1,outliers=0,pre_rope=true,recent=5,block=8
gear3_outliers              14.515625   0.07401
    gear:bits=3,rank=0,outliers=0.1,scale_dtype=float32,group_size=8,sink=1,block=16
zipcache42                  5.7578125   0.1507   zipcache:probes=8,sink=2,recent=3,block=16
zipcache83                  8.5078125   0.08127
    zipcache:salient_bits=8,other_bits=3,probes=4,unimportant_ratio=0.7,scale_dtype=float32,
    recent=5,block=24
values_only                 13.0        0.002379
    k=dense+v=innerq:bits=8,mode=sym+cache:sink=0,recent=4,block=16
"""
# Tokens that are generated are coded in another way than those of a prompt, on purpose.
CODED_OTHERWISE = {"innerq2_hybrid_prefill", "innerq3_slot_hybrid_prefill"}


def _case(row: str) -> MethodCase:
    name, bits, error, *spec = row.split()
    same = name not in CODED_OTHERWISE
    return MethodCase(name, "".join(spec), float(bits), float(error), same_codes_in_decode=same)


METHOD_CASES = tuple(map(_case, re.findall(r"^\S.*(?:\n .*)*", ROWS, re.MULTILINE)))

EXHAUSTIVE = pytest.mark.exhaustive


def kind(spec: str) -> str:
    """Name the way in which a spec stores tokens: its method without bits, `k` for one on each
    side, or that it wraps another's codec (the first such row does so twice). The formats of small
    floats are one way, and so are groups with a second scale. Rows in a calibrated rotation are
    stored as int4's are, runs of channels of one width as waterfill's, and squat's keys alike
    before RoPE and after it."""
    if "subtract_bias" in spec or "rotate" in spec:
        return "wrapped"
    name = re.split("[:=]", spec)[0].rstrip("0123456789")
    alike = {"mxfp": "fp", "nvfp": "fp", "oscar_omni": "kvarn", "block_gtq": "waterfill"}
    alike |= dict.fromkeys(("oscar_spectral", "optr"), "int") | {"squat_pre": "squat"}
    return alike.get(name, name)


# The rows of every run, the first of each kind. The others are variants of these, and run with
# --exhaustive.
ONE_OF_EACH = tuple({kind(case.spec): case for case in reversed(METHOD_CASES)}.values())


# What a layer holds beside codes, one of each: nothing, blocks, statistics of a prompt, outliers,
# inputs of layers, differences of layers, probes. For laws of what surrounds a codec.
ONE_OF_EACH_LAYER = (
    *("dense", "kivi2", "innerq2", "kvquant4", "xquant4", "xquant_cl2", "zipcache42"),
)


def cases(*ids: str, every: bool = False, usual: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test over the table, or over the rows named. Of the table, rows outside
    ONE_OF_EACH run with --exhaustive alone; `every` takes all of them, for tests that are quick,
    and for the one that shows each row at work. If `usual` is given, the rows outside it do.

    The scope puts all tests of a row in a file side by side, which share its compiled programs
    before they are dropped.
    """
    chosen = [
        pytest.param(
            case,
            marks=(
                ()
                if every or (case.id in (usual or ids) if usual or ids else case in ONE_OF_EACH)
                else EXHAUSTIVE
            ),
            id=case.id,
        )
        for case in METHOD_CASES
        if not ids or case.id in ids
    ]
    return pytest.mark.parametrize("case", chosen, scope="module")
