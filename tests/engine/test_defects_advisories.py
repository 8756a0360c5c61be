"""The table of the engine's defects is true of this repository, and a run reports which of them it meets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe.config import rules
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.engine.defects import TESTED, defects_met, known_defects, start_lines, text

ROOT = Path(__file__).parents[2]
DEFECTS = known_defects()
OLD, NEW = TESTED
TINY = build({**PRESETS["tiny"]})


def met(run: Run, version: tuple[int, ...] = OLD) -> set[str]:
    return {defect.id for defect in defects_met(run, version)}


def test_every_mechanism_is_where_the_table_says() -> None:
    for defect in DEFECTS:
        assert defect.where or defect.treatment == "not used", "what is done has to be somewhere"
        for file, word in defect.where.items():
            source = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(re.escape(word) + (r"\b" if word[-1].isalnum() else ""), source), (file, word)


def test_no_flags_are_refused_for_a_defect_of_the_engine() -> None:
    """The last such rule went with the expert bias over softmax scores, which works here."""
    assert {defect.treatment for defect in DEFECTS} == {"overridden", "not used", "kept"}
    run = replace(TINY, moe_router_score_function="softmax", moe_router_enable_expert_bias=True)
    assert "E20" in met(run)
    rules.check_model(run, 1)


def test_a_defect_is_met_by_its_flags_and_by_no_others() -> None:
    dense = replace(TINY, num_experts=None, moe_router_enable_expert_bias=False)
    assert met(dense) == {"S12", "S21", "S23", "S28"}
    assert {"E14", "E18", "E22"} <= met(TINY) and not {"E1", "E2", "E19", "S2"} & met(TINY)
    assert {"E1", "E2", "E19"} <= met(replace(TINY, bf16=True))
    assert "E22" not in met(replace(TINY, moe_router_bias_center=True))
    sequence_parallel = replace(TINY, tensor_model_parallel_size=2, sequence_parallel=True)
    assert {"E6", "S2", "S4", "S13", "N3"} <= met(sequence_parallel)
    assert ["E6" in met(sequence_parallel, version) for version in ((0, 18, 2), (0, 19, 0), NEW)] == [
        True,
        False,
        False,
    ]
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
    for defect in DEFECTS:
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
    assert all(f"\n{defect.id}  " in done.stdout for defect in DEFECTS)
