"""What config.json may not say: each line names the key, its value, the rule, and what works instead."""

from pathlib import Path

import pytest
import yaml

from megatron_moe.config.errors import ConfigError
from tests.config.refused import refused
from tests.hf.test_config import read, saved

ROWS = yaml.load(Path(__file__).with_name("config_refusals.yaml").read_text(), Loader=yaml.CSafeLoader)


@pytest.mark.parametrize(
    ("case", "changes", "says"), ROWS, ids=[f"{case}-{next(iter(changes))}" for case, changes, _ in ROWS]
)
def test_what_is_not_computed_here_or_contradicts_itself_is_refused_by_key(case, changes, says):
    good = saved(case)
    bad = {key: value for key, value in {**good, **changes}.items() if value != {}}
    read(good)
    refused(lambda: read(bad), "--load-hf folder: config.json: ", *says)


@pytest.mark.parametrize("case", ["deepseek-v3", "mixtral"])
def test_prediction_tensors_that_the_configuration_knows_nothing_of_are_refused(case):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        read(saved(case), prediction=True)
