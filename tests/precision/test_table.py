"""The printed contract is what a training step really does."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.module_names import SHORT
from megatron_moe.config.schema import build
from megatron_moe.precision import table
from megatron_moe_tools.pretrain import main
from tests.helpers.stepped_trainer import SMALL, TINY, Trainer

PACKED = {"use_precision_aware_optimizer": True}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, fp64 router, capacity": {"bf16": True, "moe_router_dtype": "fp64", "moe_expert_capacity_factor": 1.0},
    "bf16 gradients, fp32 residual, further predictions": {"bf16": True, "grad_reduce_in_bf16": True}
    | {"fp32_residual_connection": True, "mtp_num_layers": 1},
    "fp16 gradients": {"fp16": True, "accumulate_allreduce_grads_in_fp32": False},
    "classes kept in fp32": {"bf16": True, "keep_fp32": ("norms", "router", "experts", "shared_experts")},
    "packed state": {"bf16": True, **PACKED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "moments in codes, other classes kept": {"fp16": True, **PACKED, "exp_avg_dtype": "int8"}
    | {"exp_avg_sq_dtype": "int8", "keep_fp32": ("embedding", "output_layer", "attention")},
    "FP8": {"bf16": True, "fp8_format": "hybrid"},
}


def measured(flags: dict[str, Any]) -> dict[str, str]:
    """Dtypes seen in one training step and in the checkpoint's tensors, by "class column"."""
    from megatron_moe.checkpoint.state import model_shards
    from megatron_moe.engine.optimizer import parts
    from megatron_moe.moe import router as router_file

    trainer = Trainer({**SMALL, "seq_length": 32, "micro_batch_size": 8, "initial_loss_scale": 256.0, **flags})
    model = trainer.model[0]
    seen: dict[str, str] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        seen[name] = SHORT.get(dtype, dtype)

    classes = {
        "word_embeddings.weight": "embedding",
        "output_layer.weight": "output layer",
        "self_attention.linear_proj.weight": "attention weights",
        "input_layernorm.weight": "norms",
        "router.weight": "router weight",
        "experts.weight1": "expert weights",
        "shared_experts.linear_fc1.weight": "shared expert weights",
    }
    if "mtp_num_layers" in flags:
        classes["eh_proj.weight"] = "merge of further predictions"
    parameters = dict(model.named_parameters())
    found = {label: next(p for name, p in parameters.items() if name.endswith(end)) for end, label in classes.items()}
    layer = next(m for name, m in model.named_modules() if name.endswith("decoder.layers.1"))
    real_route = router_file.route

    def route(logits: torch.Tensor, scores: torch.Tensor, *args: Any) -> Any:
        decision = real_route(logits, scores, *args)
        for name, tensor in (("router logits", logits), ("router scores", scores), ("router probs", decision.probs)):
            note(f"{name} stored", tensor)
        return decision

    layer.register_forward_hook(lambda _m, _i, output: note("residual stream stored", output[0]))
    model.register_forward_hook(lambda _m, _i, output: note("loss stored", output))
    with mock.patch.object(router_file, "route", route):
        assert trainer.step().committed
    for label, parameter in found.items():
        note(f"{label} stored", parameter)
    dense = found["attention weights"] if "attention" not in flags.get("keep_fp32", ()) else found["norms"]
    note("weight gradients stored", dense.main_grad)
    note("gradient reduction reduced", dense.main_grad)
    router = next(m for m in model.modules() if type(m).__name__ == "TopKRouter")
    note("expert_bias stored", router.expert_bias)
    note("token counts stored", router.local_tokens_per_expert)
    if router.local_dropped_per_expert is not None:
        note("dropped choices stored", router.local_dropped_per_expert)
    for part in parts(trainer.optimizer):
        for master in part.get_parameters():
            state = part.optimizer.state[master]
            note("master weights stored", master)
            if "low_bits" in state:
                seen["master weights stored"] = f"bf16 + {str(state['low_bits'].dtype).removeprefix('torch.')}"
            note("Adam moments stored", state["exp_avg_sq"])
            if state["exp_avg_sq"].dtype == torch.uint8:  # the second moment has no sign
                note("Adam moments stored", state["exp_avg"])
    saved = {shard.key: torch.empty(0, dtype=shard.dtype) for shard in model_shards(trainer.trained)}
    for end, label in {**classes, "router.expert_bias": "expert_bias"}.items():
        note(f"{label} saved", next(tensor for key, tensor in saved.items() if key.endswith(end)))
    return seen


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_dtypes_of_the_table(gloo, name):
    (seen,) = gloo.run(1, measured, flags=CASES[name])
    rows = table.contract(build({**TINY, **CASES[name]}))
    wanted = {f"{row.name} {column}": getattr(row, column) for row in rows for column in ("stored", "reduced", "saved")}
    assert seen == {what: wanted[what] for what in seen}
    assert len(seen) > 25


def rows_of(**flags: Any) -> dict[str, Any]:
    return {row.name: row for row in table.contract(build({**TINY, **flags}))}


def test_the_contract_says_what_is_multiplied_in_fp8() -> None:
    flags = {"bf16": True, "fp8_format": "hybrid"}
    rows = rows_of(**flags)
    for name in ("expert weights", "shared expert weights", "dense MLP weights", "attention weights"):
        assert (rows[name].stored, rows[name].computed) == ("bf16", "e4m3")
    assert rows["rows of products in FP8"].computed == "e4m3"
    assert rows["gradients of products in FP8"].computed == "e5m2"
    assert rows["embedding"].computed == rows["output layer"].computed == "bf16"
    assert rows["router weight"].computed == "fp32"
    rows = rows_of(**flags, fp8_modules=("experts",))
    assert [rows[name].computed for name in ("expert weights", "attention weights")] == ["e4m3", "bf16"]
    assert "layers 0, 3 multiply in bf16" in table.title(build({**TINY, **flags, "first_last_layers_bf16": True}))
    assert "--fp8-format e4m3" in table.title(build({**TINY, "bf16": True, "fp8_format": "e4m3"}))


def test_the_contract_says_which_moments_are_rounded() -> None:
    for flags, note in ((PACKED, ""), ({**PACKED, "exp_avg_sq_dtype": "bf16"}, "rounded at random")):
        assert rows_of(bf16=True, **flags)["Adam moments"].note == note
        assert "--exp-avg-dtype fp32" in table.title(build({**TINY, "bf16": True, **flags}))
    assert "--exp-avg" not in table.title(build(TINY))


def test_the_contract_says_whose_gradients_are_rounded_before_they_are_added() -> None:
    def note(**flags: Any) -> str:
        return rows_of(**flags)["weight gradients"].note

    rounded = "main_grad, a sum of what each micro-batch rounds to bf16"
    assert note() == "main_grad"
    assert note(bf16=True) == f"{rounded}, but for: router"
    both = {"gradient_accumulation_fusion": True, "cross_entropy_loss_fusion": True}
    assert note(bf16=True, **both) == f"{rounded}, but for: router, experts, output layer"
    for never in ({"gradient_accumulation_fusion": False}, {"grad_reduce_in_bf16": True}, {"use_torch_fsdp2": True}):
        assert note(bf16=True, **never) == rounded


def test_print_precision_needs_no_data_and_no_ranks_and_refuses_contradictions(capsys: Any) -> None:
    assert main(["--preset", "deepseek-v3", "--print-precision", "--keep-fp32", "norms", "decoder.layers.0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("precision contract for --bf16 --keep-fp32 norms decoder.layers.0\n")
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert rows["norms"][1] == "fp32" and rows["modules decoder.layers.0"][2] == "fp32"
    assert rows["expert weights"][2] == "bf16"
    assert main(["--preset", "tiny", "--bf16", "--fp16", "--print-precision"]) == 2
    assert "--bf16, --fp16: choose one" in capsys.readouterr().err
