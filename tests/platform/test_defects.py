"""The file of the engine's defects is checked when it is read, and a condition means what its words say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_moe.config.schema import Run, build
from megatron_moe.platform.defects import Condition, DerivedValues, known_defects, read_defects
from tests.helpers.sources import ROOT
from tests.platform import defects_page

ENTRY: dict[str, Any] = {
    "id": "E7",
    "title": "sums are wrong",
    "source": "transformer/moe/router.py",
    "since": "0.16.1",
    "fixed_in": "0.19.0",
    "when": {"num_experts": "set", "tensor_model_parallel_size": "> 1"},
    "treatment": "overridden",
    "how": "sums are right",
    "where": {"megatron_moe/moe/router.py": "class TopKRouter"},
    "tests": ["tests/platform/test_defects_router.py::test_it"],
    "without_cuda_only": True,
}


def read(folder: Path, *entries: Any) -> Any:
    path = folder / "engine_defects.yaml"
    path.write_text(yaml.safe_dump(list(entries)), encoding="utf-8")
    return read_defects(path)


def test_an_entry_becomes_a_defect(tmp_path: Path) -> None:
    (defect,) = read(tmp_path, ENTRY)
    assert (defect.id, defect.title, defect.how) == ("E7", "sums are wrong", "sums are right")
    assert defect.when == (Condition("num_experts", "set"), Condition("tensor_model_parallel_size", "> 1"))
    assert (defect.since, defect.fixed_in, defect.without_cuda_only) == ((0, 16, 1), (0, 19, 0), True)
    assert defect.is_present((0, 16, 1)) and defect.is_present((0, 18, 9))
    assert not defect.is_present((0, 16, 0)) and not defect.is_present((0, 19, 0))
    assert defect.tests == ("tests/platform/test_defects_router.py::test_it",)
    (none,), (every,) = (read(tmp_path, {**ENTRY, "when": when}) for when in ("no run", "every run"))
    assert every.is_met(Run(), 1) and not none.is_met(Run(), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fixd_in": "0.19.0"}, ["fixd_in", "fixed_in"]),
        ({"title": None}, ["title"]),
        ({"title": "a | b"}, ["title"]),
        ({"how": "two\nlines"}, ["how"]),
        ({"fixed_in": 0.19}, ["fixed_in", "0.19"]),
        ({"treatment": "ignored"}, ["treatment", "ignored", "overridden"]),
        ({"without_cuda_only": "no"}, ["without_cuda_only"]),
        ({"where": {}}, ["where"]),
        ({"where": {"megatron_moe/moe/router.py": None}}, ["where"]),
        ({"tests": []}, ["tests"]),
        ({"tests": ["by hand"]}, ["tests", "by hand"]),
        ({"no_test": "none needed"}, ["no_test"]),
        ({"when": "sometimes"}, ["when", "sometimes"]),
        ({"when": {}}, ["when"]),
        ({"when": {"num_expert": "set"}}, ["num_expert", "did you mean num_experts"]),
        ({"when": {"half_precison": True}}, ["half_precison", "did you mean half_precision"]),
        ({"when": {"sequence_parallel": "yes"}}, ["sequence_parallel", "yes"]),
        ({"when": {"sequence_parallel": "set"}}, ["sequence_parallel", "set"]),
        ({"when": {"half_precision": "> 1"}}, ["half_precision", "> 1"]),
        ({"when": {"micro_batch_size": ">1"}}, ["micro_batch_size", ">1"]),
        ({"when": {"recompute_granularity": "some"}}, ["recompute_granularity", "some", "selective"]),
        ({"when": {"recompute_granularity": None}}, ["recompute_granularity", "None"]),
    ],
    ids=str,
)
def test_a_malformed_entry_is_refused_with_its_id_and_key(tmp_path: Path, change: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        read(tmp_path, {**ENTRY, "id": "E6"}, {**ENTRY, **change})
    assert str(refused.value).startswith("engine_defects.yaml: E7: ")
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_missing_key_is_refused(tmp_path: Path) -> None:
    for key in ("title", "source", "when", "treatment", "how", "where", "tests"):
        with pytest.raises(ValueError, match=f"^engine_defects.yaml: E7: .*{key}"):
            read(tmp_path, {name: value for name, value in ENTRY.items() if name != key})


def test_a_defect_that_is_overridden_needs_a_test_and_one_that_is_not_used_a_reason(tmp_path: Path) -> None:
    untested = {**ENTRY, "no_test": "read in the source"}
    del untested["tests"]
    with pytest.raises(ValueError, match=r"E7: .*overridden needs a test"):
        read(tmp_path, untested)
    (defect,) = read(tmp_path, {**untested, "treatment": "not used"})
    assert defect.no_test == "read in the source" and defect.tests == ()


def test_ids_are_given_and_unique(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="E7: is there twice"):
        read(tmp_path, ENTRY, ENTRY)
    with pytest.raises(ValueError, match="entry 2: needs an id"):
        read(tmp_path, ENTRY, {**ENTRY, "id": "X1"})
    with pytest.raises(ValueError, match="entry 1: needs an id"):
        read(tmp_path, "E7")


def holds(name: str, wanted: Any, world_size: int = 1, **flags: Any) -> bool:
    condition = Condition(name, wanted)
    condition.check()
    return condition.holds(DerivedValues(build(flags), world_size))


def test_a_condition_on_a_field() -> None:
    assert holds("num_experts", "set", num_experts=4) and not holds("num_experts", "set")
    assert holds("keep_fp32", "set", keep_fp32=("norms",)) and not holds("keep_fp32", "set", keep_fp32=())
    assert holds("sequence_parallel", False) and not holds("sequence_parallel", False, sequence_parallel=True)
    assert holds("micro_batch_size", "> 1", micro_batch_size=2) and not holds("micro_batch_size", "> 1")
    assert holds("moe_z_loss_coeff", "> 0", moe_z_loss_coeff=1e-3) and not holds("moe_z_loss_coeff", "> 0")
    several = {"moe_router_load_balancing_type": ("aux_loss", "global_aux_loss")}
    assert holds("moe_router_load_balancing_type", "global_aux_loss", **several)
    assert not holds("moe_router_load_balancing_type", "sinkhorn", **several)


def test_a_condition_on_a_derived_value() -> None:
    biased = {"num_experts": 4, "moe_router_enable_expert_bias": True}
    assert holds("expert_bias", True, **biased) and not holds("expert_bias", True, **{**biased, "num_experts": None})
    assert holds("half_precision", True, fp16=True) and holds("half_precision", False)
    assert holds("tp_times_cp", "> 1", context_parallel_size=2) and not holds("tp_times_cp", "> 1")
    assert holds("expert_tp_size", 2, tensor_model_parallel_size=2)
    assert holds("world_size", "> 1", world_size=2) and not holds("world_size", "> 1")


def test_a_condition_reads_as_the_flag() -> None:
    assert str(Condition("sequence_parallel", True)) == "--sequence-parallel"
    assert str(Condition("sequence_parallel", False)) == "no --sequence-parallel"
    assert str(Condition("num_experts", "set")) == "--num-experts"
    assert str(Condition("tensor_model_parallel_size", "> 1")) == "--tensor-model-parallel-size > 1"
    assert str(Condition("half_precision", True)) == "half precision"


def test_the_page_has_the_table_of_the_package() -> None:
    text = defects_page.PAGE.read_text(encoding="utf-8")
    assert text == defects_page.page(text), "run: python -m tests.platform.defects_page"


def test_a_defect_names_tests_that_exist() -> None:
    for file, name in (test.split("::") for defect in known_defects() for test in defect.tests):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
