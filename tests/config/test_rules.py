"""Every rule refuses the run that breaks it, naming flags and values, and lets its neighbour pass."""

import contextlib
import importlib.util
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_moe.config import rules, schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.rules import training
from megatron_moe_tools import compat

BARE = "--preset tiny"
TINY = f"{BARE} --mock-data --vocab-size 256"
BASES = {
    "BARE": BARE,
    "TINY": TINY,
    "BYTES": f"{BARE} --tokenizer-type ByteTokenizer",
    "GQA": "--preset tiny-gqa --mock-data --vocab-size 256",
    "DENSE": "--mock-data --vocab-size 256 --train-iters 5",
    "FLAT": f"{TINY} --moe-router-num-groups none --moe-router-group-topk none",
}
BASES["QUANTILES"] = f"{BASES['FLAT']} --moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0"
TABLE = yaml.load(Path(__file__).with_name("refusals.yaml").read_text(), Loader=yaml.CSafeLoader)
RANGES = {name: field.within for name, field in all_fields().items() if field.within is not None}
ROWS = [pytest.param(rule, row, id=f"{rule}-{n}") for rule, found in TABLE.items() for n, row in enumerate(found)]


@pytest.fixture(autouse=True)
def without_transformer_engine(monkeypatch):
    """The machine of these tests has no Transformer Engine, wherever they run."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "megatron_moe.config.rules.training.importlib.util.find_spec",
        lambda name: None if name == "transformer_engine" else found(name),
    )


def refusal(run: schema.Run, world_size: int) -> tuple[str, str]:
    """Name of the first rule that refuses a run, and its message."""
    with pytest.raises(ConfigError) as caught:
        rules.check(run, world_size)
    for rule in rules.RULES:
        try:
            rule.check(run, world_size)
        except ConfigError as error:
            assert str(error) in str(caught.value)
            return rule.name, str(error)
    raise AssertionError("no rule refuses it")


def run_of(base: str = "TINY", flags: str = "") -> schema.Run:
    return compat.parse(shlex.split(f"{BASES[base]} {flags}"))


@pytest.mark.parametrize(("rule", "row"), ROWS)
def test_a_broken_rule_refuses_by_name_and_its_neighbour_passes(rule, row, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    base, world = row.get("base", "TINY"), row.get("world", 1)
    bad, good = (f"{row.get('with', '')} {row.get(kind, '')}" for kind in ("bad", "good"))
    refused = schema.replace(run_of(base, bad), **row.get("set", {}))
    by, message = refusal(refused, world)
    assert by == rule, message
    assert "\n" not in message
    for text in row["says"]:
        assert text in message
    rules.check(run_of(row.get("good_base", base), good), row.get("good_world", world))


def test_mistakes_that_have_nothing_to_do_with_each_other_come_in_one_message_and_no_consequences():
    several = "--lr 0 --hidden-size -1 --bf16 --fp16 --moe-router-topk 99"
    for flags, lines in ((several, 5), ("--bf16 --fp16 --grad-reduce-in-bf16", 1)):
        with pytest.raises(ConfigError) as caught:
            rules.check(run_of(flags=flags), 1)
        assert len(str(caught.value).splitlines()) == lines, caught.value


def test_a_dry_run_names_the_packages_that_this_machine_lacks_and_does_without():
    run = run_of(flags="--transformer-impl transformer_engine --dry-run")
    rules.check(run, 1)
    assert ["Transformer Engine is not installed" in text for text in rules.missing_packages(run, 1)] == [True]
    assert rules.missing_packages(run_of(flags="--moe-token-dispatcher-type flex"), 1) == []  # refused by `check`


def test_every_rule_is_broken_by_a_row():
    names = [rule.name for rule in rules.RULES]
    assert len(set(names)) == len(names)
    assert set(names) == TABLE.keys() | {"values_are_allowed"}


def test_every_number_has_a_range_or_a_list_of_choices():
    numbers = {name: field for name, field in all_fields().items() if set(field.kinds) <= {int, float}}
    assert set(RANGES) == {name for name, field in numbers.items() if field.choices is None}


def test_a_number_outside_its_range_is_refused_with_flag_and_value():
    base = schema.flatten(run_of())
    for name, allowed in RANGES.items():
        field = all_fields()[name]
        bounds = [b for b in (allowed.low, allowed.above) if b is not None]
        outside = [bounds[0] - 1] + [b for b in (allowed.above, allowed.below) if b is not None]
        if float in field.kinds:
            outside += [float("nan"), float("inf")]
        for number in outside:
            number = int(number) if field.kinds == (int,) else float(number)
            rule, message = refusal(schema.build({**base, name: [number] if field.repeated else number}), 1)
            assert rule == "values_are_allowed"
            assert f"{field.flag} {number}:" in message
    assert RANGES["adam_eps"].holds(1e-37) and not RANGES["adam_eps"].holds(1e-50)  # which is zero in fp32


def test_an_unknown_choice_is_refused_also_without_a_command_line():
    base = run_of()
    for name, field in all_fields().items():
        if field.choices:
            rule, message = refusal(schema.replace(base, **{name: ["foo"] if field.repeated else "foo"}), 1)
            assert rule == "values_are_allowed"
            assert f"{field.flag} foo" in message
            assert str(field.choices[0]) in message


@pytest.mark.parametrize(
    ("changes", "modules", "refused"),
    [
        ({"transformer_impl": "transformer_engine"}, ("core_attn", "attn_proj"), True),
        ({"transformer_impl": "transformer_engine"}, ("expert_fc1",), False),
        ({"transformer_impl": "transformer_engine", "fp8_modules": ("experts",)}, ("qkv_linear",), False),
        ({"moe_expert_backend": "te"}, ("expert_fc1",), True),
        ({"moe_expert_backend": "te"}, ("qkv_linear", "moe_act"), False),
        ({}, ("qkv_linear", "expert_fc1"), False),
    ],
)
def test_inputs_of_products_are_offloaded_but_where_transformer_engine_makes_them_in_fp8(changes, modules, refused):
    offload = {"fine_grained_activation_offloading": True, "offload_modules": modules, "fp8_format": "hybrid"}
    run = schema.replace(schema.Run(), num_experts=8, **offload, **changes)
    with pytest.raises(ConfigError, match=modules[-1]) if refused else contextlib.nullcontext():
        training.offloaded_modules_are_kept(run, 1)
