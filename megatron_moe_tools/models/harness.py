"""A step as a model of lm-eval (EleutherAI's lm-evaluation-harness), at any layout.

Rank 0 runs the tasks and alone reads their data; the other ranks compute with it. What is asked of a model, and how
texts become tokens, is as in lm-eval's `HFLM` with the exported folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lm_eval
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.model.generate import continuation, token_scores
from megatron_moe.training.callback import Callback
from megatron_moe.training.evaluate import evaluation_mode
from megatron_moe.training.trainer import Trainer

Scores = list[tuple[list[float], list[int]]]
"""Of each sequence, for each of its tokens but the first, its log-probability in nats, and the likeliest one there."""
_RANKS_WAIT = timedelta(days=30)
"""As long as rank 0 may download data, or compute metrics."""
_NEW_TOKENS = 256
"""lm-eval's, where a task does not say how many."""


class RankScores:
    """Scores sequences with all ranks: rank 0 calls it, and the others `serve` until rank 0 calls `close`."""

    def __init__(self, trainer: Trainer) -> None:
        self.model, self.vocab_size = trainer.trained.model, trainer.vocab_size
        self._groups = trainer.trained.pg_collection
        self._all_ranks = dist.new_group(backend="gloo", timeout=_RANKS_WAIT)
        self.max_length = trainer.run.derived.max_position_embeddings
        self.batch_size = trainer.run.training.micro_batch_size * self._groups.dp.size()
        local = trainer.run.model.transformer_impl == "local" and trainer.run.derived.zero_stage < 2
        self.can_cache = local and dist.get_world_size() == 1

    def __call__(self, sequences: list[list[int]]) -> Scores:
        """Return the scores of up to `batch_size` sequences."""
        self._from_rank_0(sequences)
        return self._scores(sequences)

    def serve(self) -> None:
        """Compute with rank 0 until it is done."""
        while (sequences := self._from_rank_0(None)) is not None:
            self._scores(sequences)

    def close(self) -> None:
        """Let the other ranks go."""
        self._from_rank_0(None)

    def _from_rank_0(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._all_ranks)
        return box[0]

    def _scores(self, sequences: list[list[int]]) -> Scores:
        dp, unit = self._groups.dp, 2 * self._groups.cp.size() * self._groups.tp.size()
        width, rows = -(-max(map(len, sequences)) // unit) * unit, -(-len(sequences) // dp.size())
        every = torch.zeros(rows * dp.size(), width + 1, dtype=torch.int64)  # padding is behind: attention is causal
        for row, ids in enumerate(sequences):
            every[row, : len(ids)] = torch.tensor(ids)
        part = every[dp.rank() * rows :][:rows].to(platform.device())
        tokens, wanted = part[:, :-1].contiguous(), part[:, 1:].contiguous()
        log_probs, likeliest = token_scores(self.model, tokens, wanted)
        own = torch.stack((log_probs, likeliest.double()))
        whole = own.new_empty(dp.size() * len(own), rows, width)
        dist.all_gather_into_tensor(whole, own, group=dp)
        whole = whole.unflatten(0, (dp.size(), 2)).transpose(0, 1).flatten(1, 2).cpu()
        found = []
        for row, ids in enumerate(sequences):
            log_prob, token = whole[:, row, : len(ids) - 1]
            found.append((log_prob.tolist(), token.long().tolist()))
        return found


@dataclass(frozen=True)
class _Asked:
    """A text to continue: its tokens, where the answer stops, its largest number of tokens, and those so far."""

    ids: list[int]
    until: list[str]
    most: int
    new: list[int] = field(default_factory=list)


class StepLM(TemplateLM):
    """The model of lm-eval on rank 0."""

    def __init__(self, scores: RankScores, tokenizer: Tokenizer, begin: Sequence[int]) -> None:
        """`begin`: what the model's tokenizer puts before a text."""
        super().__init__()
        self._scores, self._tokenizer, self._begin = scores, tokenizer, list(begin)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that an empty context stands for."""
        return self._tokenizer.eod if self._tokenizer.bos is None else self._tokenizer.bos

    @property
    def tokenizer_name(self) -> str:
        """What identifies the tokenizer."""
        return f"{self._tokenizer.name} {self._tokenizer.sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text."""
        ids = self._tokenizer.tokenize(string)
        if add_special_tokens is False or (add_special_tokens is None and ids[:1] == self._begin):
            return ids
        return [*self._begin, *ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        limit = self._scores.max_length
        found, whole = [(0.0, True)] * len(requests), list[list[int]]()
        for _, context, wanted in requests:
            if len(wanted) > limit:
                raise ConfigError(f"a continuation has {len(wanted)} tokens; the model has {limit} positions")
            whole.append((context + wanted)[-(limit + 1) :])  # the last one is predicted alone
        for numbers in self._batches(whole, disable_tqdm):
            scores = self._scores(list(map(whole.__getitem__, numbers)))
            for number, (log_probs, likeliest) in zip(numbers, scores):
                wanted = requests[number][2]
                if wanted:  # nothing is certain
                    last = len(wanted)
                    found[number] = sum(log_probs[-last:]), likeliest[-last:] == wanted
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows as long as the model's positions."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self._scores.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[owner] += log_prob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuations; with several ranks each token costs a pass over the whole text."""
        asked = list(map(self._asked, requests))
        for numbers in self._batches([one.ids for one in asked], disable_tqdm):
            self._answer(list(map(asked.__getitem__, numbers)))
        return list(map(self._text, asked))

    def _asked(self, request: Any) -> _Asked:
        context, options = request.args
        limit: int = self._scores.max_length
        chosen: Any = normalize_gen_kwargs(options, _NEW_TOKENS)
        if chosen["do_sample"]:
            raise ConfigError(f"the task draws tokens ({options}); only the likeliest are taken here")
        most, until = chosen["max_gen_toks"], chosen.get("until") or []
        if most >= limit:
            raise ConfigError(f"the task asks for {most} tokens; the model has {limit} positions with the context")
        ids = self.tok_encode(context)[-(limit - most) :] or [self.prefix_token_id]
        stops = [until] if isinstance(until, str) else until
        return _Asked(ids, list(filter(None, stops)), most)

    def _answer(self, batch: list[_Asked]) -> None:
        """Add the tokens of the answers."""
        if self._scores.can_cache:
            for one in batch:
                for token in continuation(self._scores.model[0], one.ids, one.most, vocab_size=self._scores.vocab_size):
                    one.new.append(token)
                    if self._is_done(one):
                        break
            return
        while batch := [one for one in batch if not self._is_done(one)]:
            scores = self._scores([[*one.ids, *one.new, 0] for one in batch])  # what comes in place of 0
            for one, (_, likeliest) in zip(batch, scores):
                one.new.append(likeliest[-1])

    def _is_done(self, one: _Asked) -> bool:
        if len(one.new) == one.most or one.new[-1:] == [self.eot_token_id]:
            return True
        text = self._tokenizer.detokenize(one.new)
        return any(stop in text for stop in one.until)

    def _text(self, one: _Asked) -> str:
        """Return the answer up to where it stops."""
        ends = one.new[-1:] == [self.eot_token_id]
        text = self._tokenizer.detokenize(one.new[: len(one.new) - ends])
        for stop in one.until:
            text = text.split(stop)[0]
        return text

    def _batches(self, sequences: Sequence[Sequence[int]], quiet: bool) -> Iterator[list[int]]:
        """Yield the numbers of the sequences of each batch, the longest first."""
        order = sorted(range(len(sequences)), key=lambda number: -len(sequences[number]))
        for first in tqdm(range(0, len(order), self._scores.batch_size), disable=quiet):
            yield order[first : first + self._scores.batch_size]


class TaskEvaluation(Callback):
    """Runs lm-eval's tasks before the first step of a run.

    results: on rank 0, task -> metric -> value, as lm-eval names them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        begin: Sequence[int],
        tasks: list[str],
        include_path: str | None,
        options: dict[str, Any],
    ) -> None:
        """`options`: arguments of `lm_eval.simple_evaluate`. Raises ConfigError: lm-eval does not know a task."""
        self._tokenizer, self._begin, self._options = tokenizer, begin, options
        self._manager = TaskManager(include_path=include_path)
        for task in tasks:
            if not self._manager.match_tasks([task]):
                raise ConfigError(f"--tasks {task}: lm-eval has no such task; `lm-eval ls tasks` lists them")
        self._tasks, self.results = tasks, dict[str, dict[str, Any]]()

    def before_training(self) -> None:
        """Run the tasks. Collective over all ranks."""
        run, model = self.trainer.run, self.trainer.trained.model
        self.trainer.at("lm-eval's tasks", limited=False)
        scores = RankScores(self.trainer)
        with evaluation_mode(model, run.precision.eval_in_fp32):
            if dist.get_rank() > 0:
                scores.serve()
                return
            try:
                step = StepLM(scores, self._tokenizer, self._begin)
                found = lm_eval.simple_evaluate(
                    step, tasks=self._tasks, task_manager=self._manager, log_samples=False, **self._options
                )
            finally:
                scores.close()
        for task, metrics in found["results"].items():
            self.results[task] = {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}
