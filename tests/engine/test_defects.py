"""The table of the engine's defects is sound and true, and a run reports which of them it meets."""

import re
import subprocess
import sys
from typing import Any

import pytest

from docs import generate
from megatron_moe.config.fields import all_fields
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.engine.defects import TESTED, Condition, defects_met, facts_of, known_defects, start_lines, text
from tests.helpers.sources import ROOT

OLD, NEW = TESTED
TINY = build({**PRESETS["tiny"]})


def test_each_entry_says_what_its_defect_is_and_what_shows_it() -> None:
    known = known_defects()
    assert len({defect.id for defect in known}) == len(known) > 40
    for defect in known:
        assert defect.id[0] in "ESN" and defect.treatment in ("overridden", "not used", "kept"), defect
        assert bool(defect.tests) != (defect.no_test is not None), defect
        assert defect.where or defect.treatment == "not used", defect
        assert defect.tests or defect.treatment != "overridden", defect
        for words in (defect.title, defect.source, defect.how, *(defect.no_test or "-",)):
            assert words.strip() and "|" not in words and "\n" not in words, defect
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


def test_the_page_has_the_table_of_the_package() -> None:
    text = generate.DEFECTS.read_text(encoding="utf-8")
    assert text == generate.defects_page(text), "run: python docs/generate.py"


def test_a_defect_names_tests_that_exist() -> None:
    for file, name in (test.split("::") for defect in known_defects() for test in defect.tests):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def met(run: Run, version: tuple[int, ...] = OLD) -> set[str]:
    return {defect.id for defect in defects_met(run, version)}


def test_every_mechanism_is_where_the_table_says() -> None:
    for defect in known_defects():
        for file, word in defect.where.items():
            source = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(re.escape(word) + (r"\b" if word[-1].isalnum() else ""), source), (file, word)


def test_a_defect_is_met_by_its_flags_and_by_no_others() -> None:
    dense = replace(TINY, num_experts=None, moe_router_enable_expert_bias=False)
    assert met(dense) == {"S12", "S21", "S23", "S28"}
    assert {"E14", "E18", "E22"} <= met(TINY) and not {"E1", "E2", "E19", "S2"} & met(TINY)
    assert {"E1", "E2", "E19"} <= met(replace(TINY, bf16=True))
    assert "E22" not in met(replace(TINY, moe_router_bias_center=True))
    sequence_parallel = replace(TINY, tensor_model_parallel_size=2, sequence_parallel=True)
    assert {"E6", "S2", "S4", "S13", "N3"} <= met(sequence_parallel)
    releases = [(0, 18, 2), (0, 19, 0), NEW]
    assert ["E6" in met(sequence_parallel, version) for version in releases] == [True, False, False]
    alone = replace(sequence_parallel, expert_tensor_parallel_size=1)
    assert "S5" in met(alone) and "S5" not in met(sequence_parallel)
    losses = replace(TINY, moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(0.01,))
    per_token = replace(losses, calculate_per_token_loss=True, micro_batch_size=2)
    assert "E8" in met(per_token) and "E8" not in met(losses) and "E7" not in met(per_token)
    assert "E7" in met(replace(per_token, tensor_model_parallel_size=2, sequence_parallel=True))
    two_stages = replace(TINY, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    assert "S1" in met(two_stages) and "S1" not in met(TINY)


def test_the_list_says_what_is_done_about_each_defect_that_is_met() -> None:
    entries = text(TINY, OLD).split("\nnot met by these flags")[0].split("\n\n")[1:]
    assert [entry.split()[0] for entry in entries] == [defect.id for defect in defects_met(TINY, OLD)]
    for entry in entries:
        assert re.search(r"\n    (overridden|kept): .* \(\S+\.py.*\)", entry)
        assert max(map(len, entry.splitlines())) < 200


@pytest.mark.parametrize("version", [(0, 17, 1), (0, 18, 2), (0, 20, 0)])
def test_an_engine_that_was_not_tested_is_reported_and_not_refused(version: tuple[int, ...]) -> None:
    first, engine = start_lines(version)
    assert first.startswith(f"megatron-core {'.'.join(map(str, version))} was not tested with this project, 0.16.1 and")
    assert engine == f"engine: megatron-core {'.'.join(map(str, version))}"
    assert all(len(start_lines(tested)) == 1 for tested in TESTED)  # what is worked around asks for no line
    assert "was not tested" in text(TINY, version).splitlines()[1]


def test_the_list_holds_every_defect_and_says_why_the_others_do_not_apply() -> None:
    listed = text(TINY, NEW)
    applies, others = listed.split("\nnot met by these flags")
    for defect in known_defects():
        assert (f"\n{defect.id}  {defect.title}\n" in applies) == (defect.id in met(TINY, NEW)), defect.id
        assert f"\n{defect.id}  " in listed
    assert "here: not in this engine" in others and "here: these flags do not meet it" in others


def test_listing_needs_no_data_and_no_torch() -> None:
    program = (
        "import sys; sys.path.insert(0, '.'); import pretrain_moe\n"
        "status = pretrain_moe.main(['--preset', 'tiny', '--list-advisories'])\n"
        "print('loaded:', [name for name in ('torch', 'megatron.core') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("megatron-core ") and done.stdout.endswith("loaded: []\n")
