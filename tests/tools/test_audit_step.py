"""The audit names what it finds: module, line, dtypes; in the forward and the backward, and when the model raises."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules import module as hooks

from megatron_moe.config.schema import Run, replace
from megatron_moe.platform import numerics
from megatron_moe.precision.contract import mixes_dtypes, returns_wider
from megatron_moe.precision.fp32_state import Fp32State
from megatron_moe_tools.audit.findings import Audit, html_report, json_report, text_report
from megatron_moe_tools.audit.step import audit_module, auditing
from tests.tools import planted_deepseek_fault as planted

HERE = "tests/tools/test_audit_step.py"


def line_of(path: Path, text: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line and "line_of" not in line)


FAULT = f"tests/tools/planted_deepseek_fault.py:{line_of(Path(planted.__file__), '# THE FAULT')}"


def here(text: str) -> str:
    return f"{HERE}:{line_of(Path(__file__), text)}"


class Module(torch.nn.Module):
    """A weight, and a forward given as a function of (weight, x)."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight, x)


def audited(function: Any, dtype: torch.dtype = torch.bfloat16, x: Tensor | None = None) -> Audit:
    return audit_module(Module(function, dtype), (torch.ones(4, 4, dtype=dtype) if x is None else x,))


def test_a_layer_that_returns_fp32_is_named_with_its_first_promotion_when_the_next_product_raises():
    model, inputs = planted.crashing()
    report = audit_module(model, inputs).as_dict()
    assert report["failed"]
    first = report["unintended_promotion_list"][0]
    assert (first["module"], first["where"], first["phase"]) == ("layers.0.moe", FAULT, "forward")
    assert (first["dtypes"], first["result"]) == ("bfloat16, float32", "float32")
    widened = report["widened_modules"][0]
    assert (widened["module"], widened["kind"], widened["where"]) == ("layers.0.moe", "Experts", FAULT)
    assert report["widened_modules"][1]["taken_over_from"] == "layers.0.moe"
    (product,) = report["mixed_matmul_list"]
    assert product["module"] == "layers.1.attention" and FAULT in product["detail"]
    assert report["error"]["module"] == "layers.1.attention" and "same dtype" in report["error"]["message"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_promotion_is_found_in_forward_and_backward_with_its_line(half):
    wide = torch.ones(4, 4)
    found = audited(lambda w, x: (w * wide).to(half) + x, half).as_dict()["unintended_promotion_list"]  # line A
    assert ("aten.mul", "forward") in {(one["operation"], one["phase"]) for one in found}
    assert {one["where"] for one in found} == {here("# line A")}


def test_a_concatenation_of_two_dtypes_is_a_promotion_and_scalars_that_do_not_decide_are_none():
    audit = audited(lambda w, x: torch.cat([w, x.float()]))
    assert [one.operation for one in audit.unintended_promotions] == ["aten.cat"]
    audit = audited(lambda w, x: torch.where(x > 0, w * 2.0 + torch.tensor(0.5), w) / torch.tensor(3.0))
    assert not audit.failed and audit.unintended_promotions.count == 0
    # nor are statistics that a kernel saved for its backward
    model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.GroupNorm(2, 4)).bfloat16()
    assert audit_module(model, (torch.ones(3, 4, dtype=torch.bfloat16),)).unintended_promotions.count == 0


def test_adding_in_place_into_fp32_is_an_accumulation_and_into_bf16_a_promotion():
    into_wide = audited(lambda w, x: torch.zeros(4, 4).add_(x) + 0 * w.float().sum())
    assert into_wide.unintended_promotions.count == 0 and into_wide.accumulations.count == 1
    into_narrow = audited(lambda w, x: x.clone().add_(torch.ones(4, 4)) + w)
    (found,) = into_narrow.unintended_promotions
    assert found.detail == "rounded back into the written tensor"


def product(w: Tensor, x: Tensor) -> Tensor:
    return (w.float() * x).to(w.dtype)


def test_a_declaration_excuses_a_promotion_in_both_passes_but_not_in_the_modules_that_are_called():
    undeclared, excused = audited(product), audited(mixes_dtypes("a test")(lambda w, x: (w.float() * x).to(w.dtype)))
    assert undeclared.unintended_promotions.count == 2 and undeclared.declared_promotions.count == 0
    assert excused.unintended_promotions.count == 0 and excused.declared_promotions.count == 2
    assert {one.reason for one in excused.declared_promotions} == {"a test"}
    inner = Module(product)
    outer = audit_module(Module(mixes_dtypes("outer")(lambda w, x: inner(x) + w)), (torch.ones(4, 4).bfloat16(),))
    assert outer.unintended_promotions.count > 0


def attention(w: Tensor, x: Tensor) -> Tensor:
    q = w.view(1, 1, 4, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q, x.view(1, 1, 4, 4).float())


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.mm", lambda w, x: x.float() @ w),
        ("aten.addmm", lambda w, x: torch.addmm(x.float(), x, w)),
        ("aten.bmm", lambda w, x: torch.bmm(x[None].float(), w[None])),
        ("aten.baddbmm", lambda w, x: torch.baddbmm(x[None], x[None].float(), w[None])),
        ("aten.mv", lambda w, x: torch.mv(w, x[0].float())),
        ("aten.convolution", lambda w, x: torch.conv1d(x[None].float(), w[..., None])),
        ("scaled_dot_product_attention", attention),
    ],
)
def test_a_product_of_mixed_dtypes_is_recorded_before_torch_refuses_it_and_nothing_stays_hooked(name, function):
    before = (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks))
    report = audited(function).as_dict()
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert report["failed"] and report["mixed_matmuls"] == 1 and report["unintended_promotions"] == 0
    found = report["mixed_matmul_list"][0]
    assert found["operation"] == name and set(found["dtypes"].split(", ")) == {"float32", "bfloat16"}
    assert found["where"].startswith(HERE) and report["error"]["type"] == "RuntimeError"


@returns_wider("its logits are compared in fp32")
class Wider(Module):
    pass


def test_a_module_that_widens_by_a_cast_is_listed_with_the_cast_unless_that_is_declared():
    def wide(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).float()  # line B

    report = audited(wide).as_dict()
    assert not report["failed"]
    (found,) = report["widened_modules"]
    assert (found["caused_by"], found["where"]) == ("cast", here("# line B"))
    # whoever calls a declared module may hand that on
    report = audit_module(torch.nn.Sequential(Wider(wide)), (torch.ones(4, 4).bfloat16(),)).as_dict()
    assert report["widened_modules"] == [] and set(report["declared_wider_modules"]) == {"", "0"}


class Counter(Fp32State, torch.nn.Module):
    fp32_state = ("counts",)

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda self, x: x + self.counts[:2].bfloat16().sum(), "is read through a narrower copy"),
        (lambda self, x: self.counts.copy_(x), "is written from a narrower one"),
        (lambda self, x: self.counts.add_(x), "is added to from a narrower tensor"),
    ],
)
def test_fp32_state_in_another_dtype_is_a_violation(function, says):
    model = torch.nn.Sequential(Counter(function))
    report = audit_module(model, (torch.ones(4).bfloat16(),)).as_dict()
    assert report["failed"]
    (found,) = report["fp32_state_violations"]
    assert found["detail"] == f"0.counts {says}" and found["module"] == "0" and found["where"].startswith(HERE)


def test_fp32_state_that_was_replaced_in_bf16_is_a_violation():
    model = torch.nn.Sequential(Counter(lambda self, x: x))
    model[0].counts = model[0].counts.bfloat16()
    found = audit_module(model, (torch.ones(4),)).as_dict()["fp32_state_violations"]
    assert [one["where"] for one in found] == ["before the step", "after the step"]
    assert {one["detail"] for one in found} == {"0.counts"}


def test_a_model_that_is_not_a_runs_keeps_its_switches_and_the_report_says_which():
    numerics.restore()  # what a run of another test has set
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
    name = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    model = Counter(lambda self, x: x.float() + self.counts.double().float())
    report = audit_module(model, (torch.ones(4).bfloat16(),)).as_dict()
    assert not report["failed"] and report["fp32_state_violations"] == []
    assert report["switches"][name] is True and f"{name} True" in text_report(report)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (lambda w, x: w.sum(0), "result rounded"),
        (lambda w, x: torch.softmax(w, -1), "result rounded"),
        (lambda w, x: w.cumsum(0), "result rounded"),
        (lambda w, x: x.index_add(0, torch.tensor([0, 0, 0, 0]), w), "may round every addition"),
        (lambda w, x: x.index_put((torch.tensor([0, 0, 0, 0]),), w, accumulate=True), "may round every addition"),
    ],
)
def test_a_reduction_in_bf16_is_listed_and_says_what_is_rounded(function, how):
    audit = audited(function)
    assert how in {one.detail for one in audit.low_precision_reductions if one.phase == "forward"}
    assert not audit.failed
    assert audited(function, torch.float32).low_precision_reductions.count == 0


def summed_over_ranks() -> list[tuple[str, str]]:
    def reduce(w: Tensor, x: Tensor) -> Tensor:
        for one in (x.clone(), x.float()):
            torch.distributed.all_reduce(one)
        return w

    return [(one.operation, one.detail) for one in audited(reduce).low_precision_reductions]


def test_a_collective_that_sums_bf16_is_listed_and_one_in_fp32_is_not(gloo):
    assert gloo.run(2, summed_over_ranks) == [[("c10d.allreduce_", "summed over ranks")]] * 2


def test_every_cast_is_counted_with_direction_bytes_and_pass():
    report = audited(lambda w, x: w.float() * 1.0).as_dict()
    casts = {(one["dtypes"], one["phase"], one["bytes"], one["count"]) for one in report["cast_list"]}
    assert casts == {("bfloat16->float32", "forward", 96, 1), ("float32->bfloat16", "backward", 96, 1)}
    assert report["casts"] == 2
    assert 0 < report["cast_share_of_time"] < 1 and 0 < report["cast_share_of_bytes"] < 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * torch.full((4, 4), 2.0)).to(grad.dtype)  # line C


def doubled(w: Tensor, x: Tensor) -> Tensor:
    return Twice.apply(x @ w)


def recomputed(w: Tensor, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: doubled(w, y), x, use_reentrant=True)


@pytest.mark.parametrize("function", [doubled, recomputed])
def test_the_backward_of_a_custom_function_belongs_to_its_module_also_when_it_is_recomputed(function):
    model = torch.nn.Sequential(Module(doubled), Module(function))
    x = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True)
    found = {(one.module, one.where, one.phase) for one in audit_module(model, (x,)).unintended_promotions}
    assert found == {("0", here("# line C"), "backward"), ("1", here("# line C"), "backward")}


def test_the_audits_own_sum_of_the_outputs_belongs_to_the_caller():
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    audit = audit_module(model, (torch.ones(2, 4, dtype=torch.bfloat16),))  # line of the caller
    at = here("# line of the caller")
    assert {(one.where, one.phase) for one in audit.casts} == {(at, "forward"), (at, "backward")}


def test_the_reports_say_the_same_and_the_html_is_one_escaped_file():
    model, inputs = planted.crashing()
    report = audit_module(model, inputs, about={"subject": "<script>alert(1)</script>"}).as_dict()
    parsed = json.loads(json_report(report))
    assert parsed["unintended_promotions"] == 1 and isinstance(parsed["casts"], int)
    text, page = text_report(report), html_report(report)
    assert text.splitlines()[0] == parsed["verdict"] and parsed["verdict"].startswith("FAILED: 1 unintended promotion")
    assert FAULT in text and FAULT in page
    assert page.count("<script") == 1 and not re.search(r"<[^>]+\b(src|href)=", page)


# ---- --audit-precision in a run: every rank traces, rank 0 reports for all, and the numbers stay what they were

FLAGS = {"audit_precision": True, "train_iters": 2}


def traced_step(folder: str, fail_on: int | None = None) -> list[str]:
    """One matrix product under the audit; rank 1's is followed by a promotion."""
    rank = torch.distributed.get_rank()
    told: list[str] = []
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    run = replace(Run(), **FLAGS, audit_precision_output=f"{folder}/found")
    try:
        with auditing(run, [model], told.append):
            out = model(torch.ones(4, 4, dtype=torch.bfloat16))
            if rank == 1:
                out = out * torch.ones(4, 4)
            if rank == fail_on:
                raise ArithmeticError("planted")
            out.sum().backward()
    except ArithmeticError:
        told.append("raised")
    return told


def test_what_only_rank_1_mixes_stands_in_the_report_of_rank_0(gloo, tmp_path):
    told = gloo.run(2, traced_step, folder=str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] and found["ranks"] == 2 and found["unintended_promotions"] > 0
    assert {one["rank"] for one in found["unintended_promotion_list"]} == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.html", "found.json", "found.txt"]
    assert told[1] == [] and len(told[0]) == 1
    assert told[0][0].startswith(f"wrote {tmp_path}/found.txt") and "FAILED" in told[0][0]


def test_a_rank_whose_step_fails_writes_what_it_saw_and_fails(gloo, tmp_path):
    told = gloo.run(1, traced_step, folder=str(tmp_path), fail_on=0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["error"]["type"] == "ArithmeticError" and found["failed"]
    assert told[0][-1] == "raised" and told[0][0].startswith("wrote")


def steps(folder: Path, **flags: Any) -> list[dict[str, Any]]:
    from megatron_moe.config import rules
    from megatron_moe.training.run import pretrain
    from megatron_moe_tools import compat

    words = "--preset tiny --mock-data --vocab-size 100 --bf16 --seq-length 16 --global-batch-size 2 --eval-iters 0"
    metrics = folder / f"{len(flags)}.jsonl"
    run = replace(compat.parse([*words.split(), "--metrics-file", str(metrics)]), **{"train_iters": 3, **flags})
    rules.check(run, 1)
    pretrain(run, audit=auditing)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.usefixtures("one_process")
def test_the_audit_changes_no_number_of_a_run_and_is_left_out_where_one_step_is_left(tmp_path, capsys):
    prefix, checkpoints = str(tmp_path / "deep" / "audit"), str(tmp_path / "checkpoints")
    audit = {"audit_precision": True, "audit_precision_output": prefix}
    plain, audited = steps(tmp_path), steps(tmp_path, **audit, save=checkpoints, save_interval=2)
    assert f"wrote {prefix}.txt, {prefix}.json, {prefix}.html: clean" in capsys.readouterr().out
    numbers = [
        [(one["iteration"], one["loss"], one["grad_norm"]) for one in run if "grad_norm" in one]
        for run in (plain, audited)
    ]
    assert len(numbers[0]) == 3 and numbers[0] == numbers[1]
    found = Path(f"{prefix}.json")
    assert json.loads(found.read_text())["flags"]["audit_precision"] is True
    found.unlink()
    steps(tmp_path, **audit, load=checkpoints, ckpt_step=2)
    assert "only one is left: no audit" in capsys.readouterr().out
    assert not found.exists()
