"""The file of the engine's defects is sound, and a condition means what its words say."""

from __future__ import annotations

from typing import Any

from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run, build
from megatron_moe.engine.defects import Condition, facts_of, known_defects
from tests.engine import defects_page
from tests.helpers.sources import ROOT


def test_each_entry_says_what_its_defect_is_and_what_shows_it() -> None:
    known = known_defects()
    assert len({defect.id for defect in known}) == len(known) > 40
    for defect in known:
        assert defect.id[0] in "ESN" and defect.treatment in ("overridden", "not used", "kept"), defect
        assert bool(defect.tests) != (defect.no_test is not None), defect
        assert (defect.tests and defect.where) or defect.treatment != "overridden", defect
        for text in (defect.title, defect.source, defect.how, *(defect.no_test or "-",)):
            assert text.strip() and "|" not in text and "\n" not in text, defect
        defect.is_met(facts_of(Run()))  # its conditions have names that are known
        for condition in defect.when or ():
            field = all_fields().get(condition.name)
            assert condition.wanted != "set" or (field is not None and field.optional), defect
            if field is not None and field.choices and condition.wanted != "set":
                assert condition.wanted in field.choices, defect


def test_a_defect_is_in_the_releases_from_its_first_to_the_one_that_has_a_fix() -> None:
    defect = next(one for one in known_defects() if one.fixed_in == (0, 19, 0))
    present = [defect.is_present(version) for version in ((0, 16, 0), (0, 16, 1), (0, 18, 9), (0, 19, 0))]
    assert present == [False, True, True, False]


def holds(name: str, wanted: Any, **flags: Any) -> bool:
    return Condition(name, wanted).holds(facts_of(build(flags)))


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


def test_a_condition_reads_as_the_flag() -> None:
    assert str(Condition("sequence_parallel", True)) == "--sequence-parallel"
    assert str(Condition("sequence_parallel", False)) == "no --sequence-parallel"
    assert str(Condition("num_experts", "set")) == "--num-experts"
    assert str(Condition("tensor_model_parallel_size", "> 1")) == "--tensor-model-parallel-size > 1"
    assert str(Condition("half_precision", True)) == "half precision"


def test_the_page_has_the_table_of_the_package() -> None:
    text = defects_page.PAGE.read_text(encoding="utf-8")
    assert text == defects_page.page(text), "run: python -m tests.engine.defects_page"


def test_a_defect_names_tests_that_exist() -> None:
    for file, name in (test.split("::") for defect in known_defects() for test in defect.tests):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
