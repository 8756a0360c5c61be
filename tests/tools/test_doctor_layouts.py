"""What the doctor tries: a small copy with the model's features, and layouts of every kind of parallelism in use."""

import pytest

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe_tools.doctor import layouts
from megatron_moe_tools.doctor.compare import FP32, tolerances_of
from megatron_moe_tools.doctor.layouts import (
    EVERY_KIND,
    FEATURES,
    Layout,
    choose,
    common_to,
    features,
    model,
    oracle_run,
)
from megatron_moe_tools.doctor.small_copy import AUX_LOSS_COEFF, HEADS, Z_LOSS_COEFF, changed_fields, small_copy

# What a run keeps in its copy, whatever its size.
KEPT = """
multi_latent_attention group_query_attention qk_layernorm add_bias_linear untie_embeddings_and_output_weights
moe_router_score_function moe_router_pre_softmax moe_router_norm_topk_prob moe_router_enable_expert_bias
moe_router_group_score moe_expert_capacity_factor moe_token_dispatcher_type calculate_per_token_loss
recompute_granularity recompute_modules
""".split()
KEPT_OR_NOT = """
q_lora_rank num_experts moe_shared_expert_intermediate_size moe_router_num_groups mtp_num_layers
""".split()
CHANGED = {
    "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2),
    "moe_z_loss_coeff": 0.3, "moe_expert_capacity_factor": 1.5, "calculate_per_token_loss": True,
    "recompute_granularity": "selective", "recompute_modules": ("moe_act",), "mtp_num_layers": 3,
    "attention_dropout": 0.1, "bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "int8",
    "exp_avg_sq_dtype": "fp8",
}  # fmt: skip


def changes_of(model):
    """CHANGED, as far as a preset's model can have it."""
    found = dict(CHANGED)
    if model.get("num_experts") is None:
        found = {name: value for name, value in found.items() if not name.startswith("moe_")}
        found["recompute_modules"] = ("core_attn",)
    if model.get("reordered_norm") or model.get("window_size"):
        del found["mtp_num_layers"]
    return found


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("is_changed", [False, True], ids=["plain", "changed"])
def test_the_small_copy_has_the_features_of_the_model(preset, is_changed):
    run = replace(Run(), **{**PRESETS[preset], **(changes_of(PRESETS[preset]) if is_changed else {})})
    copy = small_copy(run)
    rules.check(copy, 1)
    before, after = flatten(run), flatten(copy)
    assert {name: after[name] for name in KEPT} == {name: before[name] for name in KEPT}
    assert copy.derived.parameter_count(256) < 300_000
    for name in KEPT_OR_NOT:
        assert (after[name] is None) == (before[name] is None), name
    assert copy.derived.params_dtype_name == "float32"
    assert copy.model.attention_dropout == 0.0
    # other layouts would round packed moments otherwise
    assert (copy.optimizer.exp_avg_dtype, copy.optimizer.exp_avg_sq_dtype) == ("fp32", "fp32")
    assert changed_fields(run, copy)["hidden_size"] == (run.model.hidden_size, 32) or run.model.hidden_size == 32


def test_longrope_of_the_small_copy_has_a_divisor_for_each_pair_and_its_sequences_are_long():
    divisors = {"short_factor": (1.0,) * 24, "long_factor": tuple(map(float, range(1, 25)))}
    sizes = {"kv_channels": 96, "rotary_percent": 0.5, "rotary_scaling_factor": 4.0}
    copy = small_copy(replace(Run(), rope_type="longrope", **divisors, **sizes))
    rules.check(copy, 1)
    assert copy.model.long_factor == (1.0, 2.0, 3.0, 4.0)
    assert copy.model.seq_length > copy.model.original_max_position_embeddings


def test_auxiliary_losses_of_the_small_copy_show_in_the_gradients():
    kinds, coeffs = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    moe = {"num_experts": 8, kinds: ("seq_aux_loss", "global_aux_loss"), coeffs: (1e-4, 0.2)}
    copy = small_copy(replace(Run(), **moe, moe_z_loss_coeff=0.3, moe_global_aux_loss_counts="running")).moe
    assert getattr(copy, kinds) == moe[kinds]
    assert getattr(copy, coeffs) == (AUX_LOSS_COEFF, 0.2)
    assert (copy.moe_z_loss_coeff, copy.moe_global_aux_loss_counts) == (0.3, "batch")

    without = small_copy(replace(Run(), num_experts=8)).moe
    assert getattr(without, kinds) == ("seq_aux_loss",)
    assert getattr(without, coeffs) == (AUX_LOSS_COEFF,)
    assert without.moe_z_loss_coeff == Z_LOSS_COEFF

    assert small_copy(replace(Run(), num_experts=8, **{kinds: ("sinkhorn",)})).moe.moe_z_loss_coeff is None
    assert small_copy(Run()).moe.moe_z_loss_coeff is None


@pytest.mark.parametrize(
    ("freq", "layers", "wanted"),
    [("[0]*3+[1]*58", 61, "0111"), (2, 8, "1010"), (1, 8, "1111"), ("[1]*7+[0]", 8, "1000"), ("[0]*8", 8, "0000")],
)
def test_the_small_copy_keeps_the_kinds_of_layers_in_their_order(freq, layers, wanted):
    run = replace(Run(), num_experts=8, num_layers=layers, moe_layer_freq=freq)
    assert "".join(map(str, small_copy(run).derived.moe_layer_pattern)) == wanted


def test_the_small_copy_shares_keys_as_the_model_does():
    for groups, wanted in ((1, 1), (8, 2), (16, HEADS)):
        run = replace(Run(), num_attention_heads=16, group_query_attention=True, num_query_groups=groups)
        assert small_copy(run).model.num_query_groups == wanted


def names(run: Run, ranks: int = 4, wanted: tuple[str, ...] = ()) -> list[str]:
    return [layout.name for layout in choose(run, small_copy(run), ranks, wanted).layouts]


TINY = replace(Run(), **PRESETS["tiny"])


def test_without_a_layout_every_kind_is_tried_alone_and_in_pairs():
    found = choose(TINY, small_copy(TINY), 4)
    kinds = [layout.kinds for layout in found.layouts]
    assert found.refused == [] and found.reduced_from == ""
    for kind in ("TP", "PP", "CP", "DP"):
        assert frozenset({kind}) in kinds
        for other in ("TP", "PP", "CP", "DP", "EP"):
            assert kind == other or any({kind, other} <= one for one in kinds), (kind, other)
    assert max(layout.ranks for layout in found.layouts) == 4
    etp = {(layout.flags.get("expert_tensor_parallel_size"), "EP" in layout.kinds) for layout in found.layouts}
    assert etp & {(1, True), (1, False)} and (2, True) in etp


def test_a_layout_in_use_is_reduced_to_its_kinds_and_keeps_its_extras():
    pipeline = {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}
    extras = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "moe_alltoall_by_node": True}
    own = replace(TINY, **pipeline, **extras, expert_model_parallel_size=8)
    found = choose(own, small_copy(own), 4)
    assert found.reduced_from == "PP 4, EP 8"
    assert [layout.name for layout in found.layouts] == [
        *("micro-batches-of-1", "loss-per-token", "pp2", "dp2", "dp2-ep2", "pp2-dp2", "pp2-dp2-ep2"),
        *(f"pp2-dp2-ep2-no-{extra}" for extra in ("distributed-optimizer", "overlap", "virtual-stages")),
    ]
    for layout in found.layouts[2:]:
        assert replace(small_copy(own), **layout.flags).derived.model_ranks == (2 if "PP" in layout.kinds else 1)
    full = found.layouts[6].flags
    assert full["num_layers_per_virtual_pipeline_stage"] == 1
    assert full["use_distributed_optimizer"] and full["overlap_grad_reduce"] and full["moe_alltoall_by_node"]


@pytest.mark.parametrize(
    ("letters", "stages", "small"),
    [
        ("Et|(tt|)*30mL", 8, "Et|t|tt|mL"),
        ("Et*10|(t*9|)*5t*6m|L", 8, "Etttt|mL"),
        ("E|t*60|t|mL", 4, "Etttt|mL"),
        ("Et*16|(t*15|)*2t*15mL", 4, "Et|tttmL"),
    ],
)
def test_stages_by_letters_are_reduced_to_what_is_uneven_about_them(letters, stages, small):
    pipeline = {"pipeline_model_parallel_size": stages, "pipeline_model_parallel_layout": letters}
    own = replace(TINY, num_layers=61, moe_layer_freq=1, mtp_num_layers=1, **pipeline)
    found = choose(own, small_copy(own), 4, ["pp2*"])
    assert found.refused == []
    # with the data parallel too, and without letters
    assert [one.flags.get("pipeline_model_parallel_layout") for one in found.layouts] == [small, small, None]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ["micro-batches-of-1", "loss-per-token"]),
        ({"calculate_per_token_loss": True}, ["micro-batches-of-1", "loss-per-micro-batch"]),
        ({"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.1,)}, ["loss-per-token"]),
        ({"moe_expert_capacity_factor": 1.0}, ["loss-per-token"]),
    ],
)
def test_one_process_is_held_against_itself_with_the_batch_cut_otherwise(changes, wanted):
    run = replace(TINY, **changes)
    assert [layout.name for layout in choose(run, small_copy(run), 4).layouts if not layout.masked] == wanted


def test_eight_ranks_try_triples():
    assert "tp2-pp2-dp2" in names(TINY, 8)
    assert "tp2-pp2-dp2" not in names(TINY)
    assert "tp2-pp2-dp2+demo" in [layout.name for layout in layouts.default_choice(8).layouts]


def test_the_default_layouts_have_every_feature_and_kind_of_parallelism_and_refuse_nothing():
    choice = layouts.default_choice(4)
    assert choice.refused == []
    covered = {feature for layout in choice.layouts for feature in layout.features}
    assert covered == set(FEATURES), "put what is missing into MODELS or DEFAULT_LAYOUTS"
    assert len({layout.name for layout in choice.layouts}) == len(choice.layouts)
    for name in layouts.MODELS:
        assert {kind for one in choice.layouts if one.model == name for kind in one.kinds} == EVERY_KIND, name
    # a layout is found with its model's name and without
    assert [one.name for one in layouts.default_choice(4, ["tp2"]).layouts] == ["tp2+mtp"]
    assert {one.model for one in layouts.default_choice(4, ["*+fp16"]).layouts} == {"fp16"}


def test_half_precision_is_held_against_fp32_on_one_process_and_then_against_itself():
    for name in ("bf16", "fp16"):
        first, *others = (layout for layout in layouts.default_choice(4).layouts if layout.model == name)
        assert (first.name, first.ranks) == (f"{name}-against-fp32", 1)
        assert first.copy.derived.params_dtype_name == "float32"
        assert {"bf16": "bfloat16", "fp16": "float16"}[name] == first.run.derived.params_dtype_name
        assert others and all(layout.copy.precision == layout.run.precision for layout in others)


def test_what_is_allowed_in_half_precision_follows_from_the_format_and_sees_a_factor_of_two():
    run = model("fp16")[1]
    half = {"fp16": tolerances_of(run), "bf16": tolerances_of(replace(run, fp16=False, bf16=True))}
    assert half["bf16"].gradient == 8 * half["fp16"].gradient == 2 * 2.0**-8 * (2 * 2 * 36 / 3) ** 0.5
    assert (half["bf16"].scalar, half["fp16"].scalar) == (2.0**-8, 2.0**-11)
    for allowed in half.values():
        assert max(allowed.scalar, allowed.gradient, allowed.update) < 0.5 and allowed.flips == 0
    assert tolerances_of(replace(run, fp16=False)) == FP32


def test_layouts_are_chosen_by_pattern_and_an_unknown_one_is_refused_with_those_there_are():
    assert names(TINY, wanted=("cp2", "dp2*")) == ["cp2", "dp2", "dp2-ep2"]
    with pytest.raises(ConfigError, match="--layouts xp2: none of .*, tp2, "):
        names(TINY, wanted=("xp2",))


def test_what_a_model_cannot_do_is_told_with_its_rule():
    own = replace(Run(), group_query_attention=True, num_query_groups=1)
    refused = choose(own, small_copy(own), 4).refused
    assert {"TP"} <= {kind for layout, _ in refused for kind in layout.kinds}
    assert "key/value heads must divide by TP" in refused[0][1]


def test_the_oracle_has_no_layout():
    own = replace(TINY, recompute_granularity="selective", recompute_modules=("mlp",), use_distributed_optimizer=True)
    own = replace(own, tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)
    plain = oracle_run(small_copy(own))
    assert plain.parallel == Run().parallel
    assert plain.training.recompute_granularity is None
    assert not plain.optimizer.use_distributed_optimizer


def test_what_failed_is_narrowed_to_the_fewest_kinds_and_to_a_feature_that_not_all_layouts_have():
    def layout(*kinds: str, **flags: object) -> Layout:
        return Layout("-".join(kinds), 2, flags, frozenset(kinds), copy=small_copy(TINY))

    assert features(Run()) == {"tied embeddings", "dense layers", "fp32"}  # and none of experts
    gated, plain = layout("DP", moe_shared_expert_gate=True), layout("DP")
    assert common_to([gated], [plain]) == ["shared gate"]
    assert common_to([plain], [gated]) == []
    assert common_to([layout("EP", "DP"), layout("EP", "TP")], [layout("DP"), layout("TP")]) == ["EP"]
    assert common_to([layout("PP", "CP")], [layout("PP"), layout("CP")]) == ["CP+PP"]
    assert common_to([layout("TP")], [layout("TP", "DP")]) == []
