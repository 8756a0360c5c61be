"""Learning rates and decays by name: torch's AdamW is the reference on one rank, and one rank on all layouts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_moe.config import module_names
from megatron_moe.config.schema import build
from tests.helpers import trained_steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, PP2, STORED, TINY, ZERO_3, Trainer, stopped, trained, whole
from tests.optim.layout_cases import EVERY, FEW, OFFLOAD, PACKED, require_close

pytestmark = pytest.mark.engine

# Matrices, vectors and experts; a word that a later one takes some parameters from; a peak above and ends that differ.
APART = {
    "lr_mult": ("decoder.layers.*=2", "router=0.25", "*.experts.weight2=0.5", "embedding=4", "decoder.*norm*=3"),
    "weight_decay_mult": ("attention=0", "norms=2", "experts=3", "first_layer=0.5"),
    "decoupled_lr": 3e-3,
    "decoupled_min_lr": 2e-3,
}
RATES = {"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_init": 1e-3, "lr_warmup_iters": 2, "lr_decay_iters": 6}
PLAIN = {**RATES, "weight_decay": 0.5, "lr_decay_style": "linear", **FEW}
FLAGS = {**PLAIN, **APART}
TIED = {"untie_embeddings_and_output_weights": False}
FURTHER = {"mtp_num_layers": 1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: EVERY[name] for name in EVERY if name != "CP2"},
    "offload": (1, OFFLOAD),
    "PP2, tied tables, further predictions": (2, {**PP2, **TIED, **FURTHER}),
    "DP2, ZeRO 3, offload": (2, {**ZERO_3, **OFFLOAD}),
    "packed, offload": (1, {**PACKED, **OFFLOAD}),
}


def parameters(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter of this rank by its name in the whole model."""
    from megatron_moe.checkpoint.state import unwrapped
    from megatron_moe.model.initialize import global_name

    for chunk in trainer.model:
        inner = unwrapped(chunk)
        yield from ((global_name(inner, name), parameter) for name, parameter in inner.named_parameters())


def settings(trainer: Any) -> dict[str, tuple[float, float, int]]:
    """Rate, decay and step count by parameter, from the group that it is in."""
    from megatron_moe.optim.optimizer import named_main_params

    groups = {id(main): group for group in trainer.optimizer.param_groups for main in group["params"]}
    names = {id(parameter): name for name, parameter in parameters(trainer)}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"], group["step"])
        for parameter, main in named_main_params(trainer.model, trainer.optimizer)
        for group in (groups[id(main)],)
    }


def schedule(step: int, *, peak: float, least: float) -> float:
    """The rate of a step by RATES, written out."""
    if step <= 2:
        return 1e-3 + (peak - 1e-3) * step / 2
    return least + (peak - least) * (1 - (step - 2) / 4)


def expected(name: str, shape: torch.Size, step: int) -> tuple[float, float]:
    """Rate and decay of a parameter by APART, without the patterns' reader: later lines replace earlier ones."""
    table = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    rate = schedule(step, peak=3e-3, least=2e-3) if table else schedule(step, peak=1e-2, least=1e-3)
    multiples = [(True, 1.0), (name.startswith("decoder.layers."), 2.0), (".router." in name, 0.25)]
    multiples += [(name.endswith(".experts.weight2"), 0.5), (name.startswith("embedding."), 4.0)]
    multiples += [(name.startswith("decoder.") and "norm" in name, 3.0)]
    decays = [(True, 0.0 if len(shape) == 1 else 1.0), ("self_attention" in name, 0.0), ("norm" in name, 2.0)]
    decays += [(".experts." in name, 3.0), (name.startswith("decoder.layers.0."), 0.5)]
    last_multiple, last_decay = ([value for applies, value in words if applies][-1] for words in (multiples, decays))
    return rate * last_multiple, 0.5 * last_decay


def compare_with_torch() -> None:
    """Compare steps with torch's AdamW, a group for each parameter."""
    trainer = Trainer({**STORED, **FLAGS, "clip_grad": 0.0, "adam_eps": 1e-3})
    ours = dict(parameters(trainer))
    clones = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in ours.items()}
    theirs = torch.optim.AdamW(
        [{"params": [clone], "name": name} for name, clone in clones.items()], betas=(0.9, 0.95), eps=1e-3, fused=True
    )
    for step in range(5):
        result = trainer.step()
        assert result.committed
        for group in theirs.param_groups:
            (clone,) = group["params"]
            group["lr"], group["weight_decay"] = expected(group["name"], clone.shape, step)
            clone.grad = ours[group["name"]].main_grad.clone()
        theirs.step()
        assert result.learning_rate == pytest.approx(schedule(step, peak=1e-2, least=1e-3))
        for name, clone in clones.items():
            assert torch.allclose(ours[name], clone, rtol=1e-6, atol=1e-9), f"step {step}: {name}"
    assert {value[0] for value in settings(trainer).values()} != {trainer.scheduler.get_lr({})}


def test_each_parameter_is_updated_as_by_torchs_adamw_with_its_own_group(gloo: Any) -> None:
    gloo.run(1, compare_with_torch)


@pytest.mark.parametrize("layout", rows(CASES, test=["DP2, ZeRO 3", "PP2, tied tables, further predictions"]))
def test_a_layout_trains_its_groups_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = CASES[layout]
    model = {name: value for name, value in changes.items() if name in {**TIED, **FURTHER}}
    one = once(1, trained, flags={**FLAGS, **model})
    require_close(one, gloo.run(ranks, trained, flags={**FLAGS, **changes}))


def decays_of_biases() -> dict[str, float]:
    trainer = Trainer({**STORED, **PLAIN, "multi_latent_attention": False, "qk_layernorm": False, **BIASED})
    return {name: decay for name, (_, decay, _) in settings(trainer).items()}


BIASED = {"add_bias_linear": True, "softmax_type": "learnable", "q_lora_rank": None}


def test_neither_biases_of_experts_nor_sinks_are_decayed(gloo: Any) -> None:
    (found,) = gloo.run(1, decays_of_biases)
    left_out = ("bias", "bias1", "bias2", "softmax_offset")
    kinds = {name.rpartition(".")[2] for name in found}
    assert kinds >= set(left_out)
    for name, decay in found.items():
        assert decay == (0.0 if name.endswith(left_out) or "norm" in name else 0.5), name


def test_either_name_of_a_tied_table_names_both() -> None:
    for name in module_names.TABLES:
        found = module_names.group_settings(build({**TINY, **STORED, **TIED, "lr_mult": (f"{name}=4",)}))
        assert found == dict.fromkeys(module_names.TABLES, module_names.GroupSettings(4.0))


def copies_apart(flags: dict[str, Any]) -> list[str]:
    """The weights whose copies on other ranks differ after two steps."""
    from megatron_moe.training.callbacks.checks import compare_replicas

    trainer = Trainer({**STORED, **flags})
    for _ in range(2):
        trainer.step()
    return [difference.name for difference in compare_replicas(trainer.trained)]


def test_a_copy_of_a_table_has_the_rate_of_the_table(gloo: Any) -> None:
    for model in (TIED, FURTHER):
        assert gloo.run(2, copies_apart, flags={**FLAGS, **PP2, **model}) == [[], []]


def loaded(flags: dict[str, Any], folder: str) -> tuple[dict[str, tuple[float, float, int]], tuple[None, Any]]:
    """The settings of each parameter after a checkpoint was loaded, and the state."""
    trainer = Trainer({**STORED, **flags, "load": folder})
    trainer.load()
    return settings(trainer), (None, trainer.tensors())


OTHER = {**PLAIN, "lr_mult": ("router=0.5", "norms=3", "experts=2"), "weight_decay_mult": ("*=0", "output_layer=2")}
BF16 = {"bf16": True, **DISTRIBUTED}
FROZEN_NORMS = {**PLAIN, **PP2, "bf16": True, "freeze": ("decoder.layers.0.*norm*", "decoder.layers.1.*norm*")}
MOVES = {
    "added, to ZeRO 1": ((1, {**PLAIN, "bf16": True}), (2, {**FLAGS, **BF16})),
    "dropped, to one rank": ((2, {**FLAGS, **BF16}), (1, {**PLAIN, "bf16": True})),
    "changed, ZeRO 1 to 3": ((2, {**FLAGS, **BF16}), (2, {**OTHER, **ZERO_3, "bf16": True})),
    # Groups of which the first or the last stage has no parameter.
    "changed, PP2 in bf16": ((2, {**OTHER, **PP2, "bf16": True}), (2, {**FLAGS, **PP2, "bf16": True})),
    "no norm of the first stage, PP2 in bf16": ((2, FROZEN_NORMS), (2, FROZEN_NORMS)),
    "changed, ZeRO 3 to packed ZeRO 1": ((2, {**FLAGS, **ZERO_3, "bf16": True}), (2, {**OTHER, **BF16, **PACKED})),
}


@pytest.mark.parametrize("move", rows(MOVES, test=["changed, ZeRO 1 to 3", "changed, PP2 in bf16"]))
def test_the_flags_of_the_present_run_decide_after_a_load(gloo: Any, tmp_path: Any, move: str) -> None:
    (first_ranks, first), (ranks, flags) = MOVES[move]
    saved = gloo.run(first_ranks, stopped, flags=first, folder=str(tmp_path))
    results = gloo.run(ranks, loaded, flags=flags, folder=str(tmp_path))
    wanted, found = whole(saved), whole([state for _, state in results])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    everything = {name: values for settings_, _ in results for name, values in settings_.items()}
    run = build({**TINY, **STORED, **flags})
    by_flags, decoupled = module_names.group_settings(run), flags.get("decoupled_lr") is not None
    moved = {key.rpartition(".exp_avg.")[2] for key in found if ".exp_avg." in key}
    assert everything.keys() == moved and everything.keys() >= by_flags.keys()
    for name, (rate, decay, step) in everything.items():
        own = by_flags.get(name, module_names.GroupSettings())
        table = decoupled and own.is_decoupled
        base = schedule(2, peak=3e-3, least=2e-3) if table else schedule(2, peak=1e-2, least=1e-3)
        by_name = 0.0 if "norm" in name or name.endswith("bias") else 1.0
        multiple = by_name if own.weight_decay_mult is None else own.weight_decay_mult
        assert step == 2 and (rate, decay) == pytest.approx((base * own.lr_mult, 0.5 * multiple)), name


BEFORE = {"train_iters": 4, "lr": 10e-3, "min_lr": 1e-3}
AGAIN = {"train_iters": 12, "lr": 5e-3, "min_lr": 0.0, "lr_warmup_iters": 4, "lr_warmup_init": 1e-3, "lr_restart_at": 4}
WRITTEN_OUT = [10, 7.75, 5.5, 3.25, 1, 2, 3, 4, 5, 3.75, 2.5, 1.25]
"""The rates of the twelve steps, in thousandths."""


@pytest.mark.test_all(
    instead="tests/optim/test_optimizer.py::test_a_schedule_that_begins_anew_leaves_out_what_was_not_committed"
)
def test_a_schedule_begins_anew_once_and_goes_on_through_stops(gloo: Any, tmp_path: Any) -> None:
    def run(place: str, **flags: Any) -> tuple[list[float], str]:
        """Rates by the metrics, and what the log says of them."""
        metrics = tmp_path / f"{place}.jsonl"
        common = {**trained_steps.SMALL, "lr_decay_style": "linear", "save": str(tmp_path / place)}
        gloo.run(1, trained_steps.trained, flags={**common, "metrics_file": str(metrics), **flags})
        events = trained_steps.lines(metrics.with_suffix(".events.jsonl"))
        notes = [event["text"] for event in events if event.get("text", "").startswith("learning rate:")]
        return [1e3 * line["learning_rate"] for line in trained_steps.lines(metrics)], [None, *notes][-1]

    root = str(tmp_path / "a")
    assert run("a", save_interval=2, **BEFORE) == (pytest.approx(WRITTEN_OUT[:4]), None)
    again = {**AGAIN, "load": root, "exit_interval": 7}
    rates, note = run("a", **again)  # stops within the warm-up
    assert rates == pytest.approx(WRITTEN_OUT[:7])
    assert note == "learning rate: a new schedule begins after iteration 4 (warm-up until 4); 0.001 now"
    rates, note = run("a", **again)
    assert rates == pytest.approx(WRITTEN_OUT)
    assert note == (
        "learning rate: goes on after 3 iterations of the schedule that began after iteration 4 (warm-up until 4); "
        "0.004 now"
    )
    # Without the flags of the schedule: it is the checkpoint's, or goes on where it began.
    of_checkpoint = {"load": root, "ckpt_step": 7, "train_iters": 12, "lr": 0.5}
    rates, note = run("b", **of_checkpoint, use_checkpoint_opt_param_scheduler=True)
    assert rates == pytest.approx(WRITTEN_OUT[7:]) and "that began after iteration 4" in note
    # Steps that are passed over decide nothing.
    for file in (path for step in (4, 7, 12) for path in (tmp_path / "a" / f"iter_{step:07d}").glob("*.distcp")):
        file.write_bytes(bytes(file.stat().st_size))
    rates, note = run("c", **{**BEFORE, "load": root, "train_iters": 6})
    assert rates == pytest.approx([7, 5.5, 4, 2.5])
    assert note.startswith("learning rate: goes on after 2 iterations of the schedule (")
