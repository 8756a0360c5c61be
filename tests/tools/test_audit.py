"""megatron-moe audit: our models are clean in every dtype, faults and mistakes have their exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.model import norm
from megatron_moe.moe.router import TopKRouter
from megatron_moe.optim.adam import PrecisionAwareAdam
from megatron_moe.precision import contract
from megatron_moe_tools.audit.cli import main
from tests.helpers import tiny_models

PLANTED = Path(__file__).parent / "planted_deepseek_fault.py"
TINY = ["--num-layers", "2", "--moe-layer-freq", "[0,1]", "--seq-length", "16", "--global-batch-size", "2"]


def report(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    status = main([*flags, "--json", str(folder / "audit.json"), "--text", str(folder / "audit.txt")])
    return status, json.loads((folder / "audit.json").read_text())


@pytest.mark.engine
@pytest.mark.parametrize(("preset", "dtype"), [("tiny", ["--bf16"]), ("tiny-gqa", ["--fp16"]), ("tiny-gqa", [])])
def test_our_model_mixes_nothing_in_forward_backward_and_update(tmp_path, preset, dtype):
    status, found = report(tmp_path, "--preset", preset, *dtype, *TINY)
    assert status == 0 and found["verdict"].startswith("clean")
    assert "half-precision products add in fp32, no TF32" in (tmp_path / "audit.txt").read_text()
    assert found["unintended_promotions"] == found["mixed_matmuls"] == 0
    assert found["fp32_state_violations"] == found["widened_modules"] == []
    assert found["step_committed"] and found["operations"] > 500
    assert {"decoder.layers.1.mlp", "decoder.layers.0.input_layernorm"} <= set(found["modules"])
    backward = {one["module"] for one in found["cast_list"] if one["phase"] == "backward"}
    floats = {one["dtypes"] for one in found["cast_list"]}
    assert dtype or floats <= {"float32->float64", "float64->float32"}  # sums over ranks
    assert not dtype or "decoder.layers.1.mlp.experts" in backward
    assert "?" not in backward


PACKED = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype int8"


@pytest.mark.engine
@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --grad-reduce-in-bf16",
        "--moe-router-dtype fp64 --keep-fp32 router first_layer --use-distributed-optimizer",
        f"--fp8-format hybrid {PACKED}",
        "--mtp-num-layers 2 --fp32-residual-connection --moe-z-loss-coeff 1e-3 --no-accumulate-allreduce-grads-in-fp32",
        "--mtp-num-layers 1 --keep-fp32 norms output_layer mtp.layers.0.eh_proj --calculate-per-token-loss"
        " --moe-shared-expert-gate",
    ],
)
def test_our_model_is_clean_under_flags_that_move_dtypes(tmp_path, flags):
    status, found = report(tmp_path, "--preset", "tiny", "--bf16", *TINY, *flags.split())
    assert (status, found["unintended_promotion_list"], found["mixed_matmul_list"]) == (0, [], [])
    assert found["fp32_state_violations"] == []


def test_our_norm_without_its_declaration_is_found(tmp_path, monkeypatch):
    monkeypatch.delitem(contract._CODE, norm.rms_norm_backward.eager.__code__)
    status, found = report(tmp_path, "--preset", "tiny", "--bf16", *TINY)
    assert status == 1
    promotions = found["unintended_promotion_list"]
    places = {(one["where"].rpartition(":")[0], one["phase"]) for one in promotions}
    assert places == {("megatron_moe/model/norm.py", "backward")}
    assert "decoder.layers.0.input_layernorm" in {one["module"] for one in promotions}


def test_optimizer_state_stored_otherwise_than_the_contract_says_is_a_violation(tmp_path, monkeypatch):
    init = PrecisionAwareAdam.__init__

    def careless(self: PrecisionAwareAdam, params: Any, **options: Any) -> None:
        init(self, params, **{**options, "moment_dtypes": ("fp32", "int8")})

    monkeypatch.setattr(PrecisionAwareAdam, "__init__", careless)
    monkeypatch.setattr(PrecisionAwareAdam, "pack_main_param", lambda self, main, weight: None)
    status, found = report(tmp_path, "--preset", "tiny", "--bf16", *TINY, *PACKED.split())
    violations = found["fp32_state_violations"]
    assert status == 1 and {one["dtypes"] for one in violations} == {"float32"}
    for wrong in ("(exp_avg), must be bfloat16", "(main param), must be int16"):
        where = {one["where"] for one in violations if one["detail"].endswith(wrong)}
        assert where == {"before the step", "after the step"}, wrong


def test_a_router_whose_bias_is_cast_and_a_switch_that_is_set_in_the_step_are_violations(tmp_path, monkeypatch):
    gate, before = TopKRouter.gate, torch.get_float32_matmul_precision()

    def careless(self: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("high")
        return gate(self, hidden) + self.expert_bias.bfloat16().float()

    monkeypatch.setattr(TopKRouter, "gate", careless)
    status, found = report(tmp_path, "--preset", "tiny", "--bf16", *TINY)
    assert status == 1 and torch.get_float32_matmul_precision() == before
    violations = found["fp32_state_violations"]
    router = "decoder.layers.1.mlp.router"
    cast = next(one["detail"] for one in violations if one["module"] == router)
    assert cast == f"{router}.expert_bias is read through a narrower copy"
    switches = {(one["where"], one["detail"]) for one in violations if one["operation"] == "switch"}
    assert ("after the step", "torch.backends.{cuda,mkldnn}.matmul.fp32_precision (TF32)") in switches


def test_a_module_from_a_file_is_audited_and_its_fault_found_where_nothing_raises(tmp_path, capsys):
    status, found = report(tmp_path, "--module", f"{PLANTED}:silent")
    assert status == 1 and found["error"] is None and found["mixed_matmuls"] == 0
    assert [one["module"] for one in found["widened_modules"]] == ["layers.0.moe", "layers.0"]
    places = {(one["module"], one["phase"]) for one in found["unintended_promotion_list"]}
    assert places == {("layers.0.moe", "forward"), ("layers.0.moe", "backward")}
    assert main(["--module", f"{PLANTED}:missing"]) == 2 and "missing" in capsys.readouterr().err


def test_a_hugging_face_folder_without_weights_is_audited_and_a_fault_in_transformers_own_moe_found(
    tmp_path, monkeypatch
):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    small = tiny_models.config("deepseek-v3")
    small.num_hidden_layers = 2
    small.save_pretrained(tmp_path)
    status, found = report(tmp_path, "--hf", str(tmp_path), "--bf16")
    assert found["error"] is None and found["mixed_matmuls"] == 0
    assert status == int(found["unintended_promotions"] > 0)
    assert "model.layers.1.mlp" in found["modules"]
    # What it multiplies by fp32 on purpose stays inside: every layer returns what it was given.
    assert found["modules"]["model.layers.1"]["outputs"] == ["bfloat16"]

    forward = modeling.DeepseekV3MoE.forward

    def faulty(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        weights = torch.ones(hidden_states.shape[-1], dtype=torch.float32)
        return forward(self, hidden_states) * weights

    monkeypatch.setattr(modeling.DeepseekV3MoE, "forward", faulty)
    status, found = report(tmp_path, "--hf", str(tmp_path), "--bf16")
    assert status == 1 and found["error"] is not None
    widened = {one["module"]: one["where"] for one in found["widened_modules"]}
    assert widened["model.layers.1.mlp"].startswith("tests/tools/test_audit.py")
