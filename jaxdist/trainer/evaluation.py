"""Evaluation and sampling: forward-only programs in the layout of training."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.build import make_model
from jaxdist.collectives import psum, to_varying
from jaxdist.data import BLOCK, Part, make_eval_loader
from jaxdist.data.own_batches import Placing, as_many, indexed, one_pass
from jaxdist.errors import UserError
from jaxdist.mesh import BATCH_AXES, BATCH_LIKE, batch_shards, fetched, on_cpu
from jaxdist.model import ModelDef
from jaxdist.nn.dropout import unused_keys
from jaxdist.optim.ema import EMA_STATES, ema_of, ema_of_model_state
from jaxdist.parallel.compose import get_strategy
from jaxdist.parallel.loss_results import check_metrics, read_results
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.program import check_axes, in_precision, make_program, program_and_region
from jaxdist.parallel.schedule import UserLoss
from jaxdist.parallel.strategy import Strategy
from jaxdist.parallel.wrappers.keep_fp32 import as_received
from jaxdist.precision.autocast import autocast
from jaxdist.precision.policy import accumulation_dtype
from jaxdist.runtime.watch.watchdog import Watch
from jaxdist.specs import STACKED, PyTree, active_specs, batch_spec
from jaxdist.state import TrainState, shardings_of, specs_of_arrays
from jaxdist.trainer.batches.tokenizer import tokenizer_of_data
from jaxdist.trainer.run import RunPlan, Sampler

TEMPERATURE = 0.8  # of samples: below 1, likely tokens become likelier


def averaged(state: TrainState) -> tuple[PyTree, PyTree]:
    """The moving averages of parameters and model_state that their optimizer keeps (`with_ema`), laid out and typed
    like them."""
    own = state.params, state.model_state
    average = ema_of(state.opt_state, own[0]), ema_of_model_state(state.opt_state, own[1])
    placed = jax.device_put(average, shardings_of(own))
    return jax.tree.map(lambda ema, leaf: ema.astype(leaf.dtype), placed, own)


def evaluated(state: TrainState) -> tuple[PyTree, PyTree]:
    """The parameters and model_state to evaluate, by a configuration: the moving averages where `train.ema` keeps
    them."""
    return averaged(state) if isinstance(state.opt_state, EMA_STATES) else (fetched(state.params), state.model_state)


def signs_of_training(whole: Callable[..., tuple[PyTree, PyTree]], given: tuple[PyTree, PyTree, PyTree]) -> str:
    """What an evaluation does that only training should, in words; "" where there is nothing.

    - whole: (params, model_state, batch, keys) -> (sums, new model_state), which is traced only.
    - given: (params, model_state, batch): arrays or their shapes.
    """
    rows = len(jax.tree.leaves(given[2])[0])
    before, batch = len(jax.tree.leaves(given[:2])), len(jax.tree.leaves(given[2]))
    traced, shapes = jax.make_jaxpr(whole, return_shape=True)(*given, jax.eval_shape(lambda: unused_keys(rows)))
    of_sums = [True] * len(jax.tree.leaves(shapes[0])) + [False] * len(jax.tree.leaves(shapes[1]))
    (_, by_sums), (_, by_state) = (
        dce_jaxpr(traced.jaxpr, wanted) for wanted in (of_sums, [not each for each in of_sums])
    )
    signs = {
        "draws random numbers": by_sums[before + batch :],
        "takes statistics of the batch": by_state[before : before + batch],
    }
    return " and ".join(sign for sign, read in signs.items() if any(read))


def _sums_of(whole: Callable[..., tuple[PyTree, PyTree]]) -> Callable[[PyTree, PyTree, PyTree], PyTree]:
    """(params, model_state, batch) -> the sums of `whole`, which is as in `signs_of_training`."""
    return lambda *given: whole(*given, unused_keys(len(jax.tree.leaves(given[2])[0])))[0]


def _tell_of_training(whole: Callable[..., tuple[PyTree, PyTree]], given: tuple[PyTree, PyTree, PyTree]) -> None:
    """Warn of an evaluation of a loss in training mode. The arguments are those of `signs_of_training`."""
    if (signs := signs_of_training(whole, given)) and jax.process_index() == 0:
        logging.getLogger("jaxdist").warning(
            "evaluation: the loss %s, as in training, and eval/loss is of that mode; give eval_loss= of fit, or"
            " evaluation= of linen_loss (docs/own_loss.md)",
            signs,
        )


def _measured(model: ModelDef) -> ModelDef:
    """The model whose head returns (loss sum, weight sum, {metric: (sum, weight)}, in at least fp32)."""
    if (metrics := model.metrics) is None:
        return model._replace(head=lambda *given: (*model.head(*given), {}))

    def head(*given: Any) -> tuple[Any, ...]:
        loss, weight = model.head(*given)
        found, wide = metrics(*given), accumulation_dtype(jnp.asarray(loss).dtype)
        check_metrics(found, of="metrics of the head")
        return loss, weight, jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(wide), found)

    return model._replace(head=head)


def make_eval_step(model: ModelDef, mesh: Mesh, specs: PyTree, strategy: Strategy) -> Callable[..., Any]:
    """Compiled (params, batch) -> {"loss": (sum, weight)} and the head's metrics, {name: (sum, weight)}, over the
    global batch. `model` should have no dropout; if it has, a batch may have "keys" for it, one a row."""
    check_axes(model, mesh)
    program = make_program(_measured(model), strategy, specs)

    def region(params: PyTree, batch: PyTree) -> dict[str, tuple[jax.Array, jax.Array]]:
        rows = jax.tree.leaves(batch)[0].shape[0]
        batch = to_varying({"keys": unused_keys(rows), **batch}, BATCH_LIKE)
        loss, weight, metrics, *_ = program.loss(*strategy.begin(params, specs, STACKED), batch)
        return psum(to_varying({"loss": (loss, weight), **metrics}, BATCH_LIKE), BATCH_LIKE)

    return jax.jit(
        jax.shard_map(region, mesh=mesh, in_specs=(active_specs(specs, mesh), batch_spec(mesh)), out_specs=P())
    )


def make_loss_eval_step(
    loss: UserLoss, mesh: Mesh, specs: PyTree, strategy: Strategy, options: StepOptions
) -> Callable[..., Any]:
    """(params, model_state, batch) -> {"loss": (sum, weight), ...} with the loss's metrics, over the global batch.
    `loss` is one in evaluation mode: its new state is dropped. The first call warns of one that is not."""
    options = replace(options, microbatches=1, remat="none")
    program, region_of = program_and_region(loss, strategy, specs, mesh, options)

    def region(params: PyTree, model_state: PyTree, batch: PyTree, keys: jax.Array) -> tuple[PyTree, PyTree]:
        diff, captured = strategy.begin(params, specs, None)
        parts = to_varying({"batch": batch, "keys": keys}, BATCH_LIKE)
        total, weight, extra = program.loss(diff, (captured, model_state), parts)
        metrics, new = program.settle(extra, model_state)
        return psum(to_varying({"loss": (total, weight), **metrics}, BATCH_LIKE), BATCH_LIKE), new

    split = batch_spec(mesh)
    whole = region_of(region, mesh=mesh, in_specs=(active_specs(specs, mesh), P(), split, split), out_specs=(P(), P()))
    whole, told = jax.jit(whole), False
    sums = jax.jit(_sums_of(whole))

    def step(*given: PyTree) -> dict[str, Any]:
        nonlocal told
        if not told:
            _tell_of_training(whole, given)
            told = True
        return sums(*given)

    return step


def forward_parts(plan: RunPlan) -> tuple[Any, Mesh, PyTree, Strategy]:
    """The arguments of `make_eval_step`, and the first ones of a `Generator`: the model without dropout, laid out as in
    the run. A loss in place of a model is in evaluation mode, and not in the precision of the run yet."""
    config, parts, mesh = plan.config, plan.parts, plan.mesh
    strategy = get_strategy(parts.options)
    precision, stages = parts.options.precision, mesh.shape["pipe"]
    model = make_model(config, precision, stages=stages, training=False, attention=parts.attention[0])
    if isinstance(model, ModelDef):
        model = in_precision(model, precision)
    return model, mesh, specs_of_arrays(parts.target.params), strategy


def eval_totals(plan: RunPlan) -> Callable[..., dict[str, Any]]:
    """Compiled (params, model_state, batch) -> {"loss": (sum, weight), ...}, of what `model.name` gives."""
    model, mesh, specs, strategy = forward_parts(plan)
    if not isinstance(model, ModelDef):
        return make_loss_eval_step(model, mesh, specs, strategy, plan.parts.options)
    step = make_eval_step(model, mesh, specs, strategy)
    return lambda params, _, batch: step(params, batch)


def add_up(results: Iterable[PyTree], *, on_cpu: bool) -> PyTree:
    """The sums of trees of scalars that are alike, in float64; None of no trees. on_cpu: whether devices are CPUs."""
    given: list[PyTree] = []
    for result in results:
        given.append(result)
        if on_cpu:  # as in `TrainStep`: two under way
            jax.block_until_ready(given[-2:][0])
    if not given:
        return None
    return jax.tree.map(lambda *each: float(np.sum(np.asarray(each, np.float64))), *jax.device_get(given))


def mean_metrics(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The metrics of an evaluation from {name: (sum, weight)}: NaN where all weights are 0."""
    return {f"eval/{name}": total / weight if weight else math.nan for name, (total, weight) in sums.items()}


class Evaluator:
    """Mean loss and metrics over a fixed set of held-out windows or samples; of a mixture, over a set of each part."""

    def __init__(self, plan: RunPlan, watch: Watch) -> None:
        config, whole = plan.config, [Part("", BLOCK, plan.source)]
        self._parts = [
            (
                part.name,
                part.samples / BLOCK,
                make_eval_loader(
                    part.source,
                    seq_len=config.data.seq_len,
                    global_batch=config.data.global_batch,
                    sharding=plan.sharding,
                    batches=config.train.eval_batches,
                ),
            )
            for part in plan.source.parts or whole
        ]
        self._totals = eval_totals(plan)
        self._crumbs = watch.crumbs
        self._unit, self._on_cpu = plan.source.info["unit"], on_cpu(plan.mesh)

    @property
    def batches(self) -> int:
        """How many batches an evaluation takes, of all parts."""
        return sum(loader.batches or 0 for *_, loader in self._parts)

    def __call__(self, state: TrainState) -> dict[str, float]:
        """The metrics of an evaluation:

        - "eval/loss": nats a token; of a mixture, the mean of its parts by their shares.
        - "eval/bits_per_byte": where tokens are bytes.
        - "eval/accuracy" and others: those of the model's head, or of the loss.
        - "eval/loss/NAME", "eval/accuracy/NAME": of each part of a mixture.
        """
        self._crumbs.enter("evaluation")
        shown, means, named = evaluated(state), dict[str, float](), dict[str, float]()
        for name, share, loader in self._parts:
            batches = map(loader.batch, range(loader.batches or 0))
            each = (self._totals(*shown, batch) for batch in batches)
            found = mean_metrics(add_up(each, on_cpu=self._on_cpu))
            means |= {metric: means.get(metric, 0.0) + share * mean for metric, mean in found.items()}
            named |= {f"{metric}/{name}": mean for metric, mean in found.items()} if name else {}
        loss = means.pop("eval/loss")
        bits = {"eval/bits_per_byte": loss / math.log(2)} if self._unit == "bytes" else {}
        return {"eval/loss": loss, **bits, **means, **named}


def own_evaluation(
    plan: RunPlan, watch: Watch, data: Any, loss: Any, shown_of: Callable[[TrainState], tuple[PyTree, PyTree]]
) -> Callable[[TrainState], dict[str, float]]:
    """state -> the mean loss over the batches of `eval_data`, and the metrics of a loss or of a model's head: NaN where
    all weights are 0. The first batch is tried here, without computing anything.

    data: batches of one epoch. shown_of: the parameters and the model_state to evaluate, of a state.
    """
    mesh, precision = plan.mesh, plan.parts.options.precision
    if indexed(data, "eval_data") is None and one_pass(data) is data:
        raise UserError(
            "eval_data: can be read once only; give what can be read again: a list, or the function that makes it"
        )

    def own(params: PyTree, model_state: PyTree, batch: PyTree, keys: jax.Array) -> tuple[dict[str, Any], PyTree]:
        run = autocast(loss, precision.compute) if precision.per_op else loss
        carried = [model_state] if jax.tree.leaves(model_state) else []
        total, results = read_results(run(as_received(params, precision), batch, keys, *carried), model_state)
        return {"loss": (total, results.weight), **results.metrics}, results.model_state

    if isinstance(loss, ModelDef):
        specs = specs_of_arrays(plan.parts.target.params)
        step = make_eval_step(in_precision(loss, precision), mesh, specs, get_strategy(plan.parts.options))
        whole: Callable[..., tuple[PyTree, PyTree]] = jax.jit(
            lambda params, model_state, batch, keys: (step(params, {**batch, "keys": keys}), model_state)
        )
    else:
        whole = jax.jit(own)
    totals = jax.jit(_sums_of(whole), out_shardings=NamedSharding(mesh, P()))
    placing = Placing(plan.sharding, {axis: mesh.shape[axis] for axis in BATCH_AXES}, "eval_data")

    def batches() -> Iterator[PyTree]:
        number = -1
        for number, batch in enumerate(as_many(one_pass(data), "eval_data")):
            yield placing.place(placing.host(batch, number))
        if number < 0:
            raise UserError("eval_data: gives no batches; give an iterable that does")

    def evaluate(state: TrainState) -> dict[str, float]:
        watch.crumbs.enter("evaluation")
        shown = shown_of(state)
        sums = add_up((totals(*shown, batch) for batch in batches()), on_cpu=on_cpu(mesh))
        return mean_metrics(sums)

    first, model = (plan.parts.evaluated, plan.parts.target.model_state, next(batches())), plan.parts.model
    jax.eval_shape(totals, *first)
    if loss is model or loss is getattr(model, "evaluation", None):  # another one is as the user wants it
        _tell_of_training(whole, first)
    return evaluate


@dataclass
class Ending:
    """Whether evaluations get better, and the metrics of the last step. One that is not finite tells nothing of that:
    it does not count. `Recorder` warns of it.

    - patience: the run ends after so many evaluations in a row that are not better; None: never.
    - min_delta: how much lower than the best an "eval/loss" must be to be better.
    - best: the lowest "eval/loss" that was better. since: the evaluations since then.
    """

    patience: int | None
    min_delta: float = 0.0
    best: float | None = None
    since: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    def __call__(self, evaluation: Mapping[str, float]) -> bool:
        loss = evaluation["eval/loss"]
        if math.isfinite(loss):
            better = self.best is None or loss < self.best - self.min_delta
            self.best, self.since = (loss, 0) if better else (self.best, self.since + 1)
        return self.is_over

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Go on from the record of a checkpoint."""
        saved = meta.get("ending", meta.get("fit", {}))  # older versions of `fit` had it in its own record
        self.best, self.since = saved.get("best"), saved.get("since", 0)

    @property
    def saved(self) -> dict[str, Any]:
        """What is saved beside a state, for `restore`."""
        return {"ending": {"best": self.best, "since": self.since}}

    @property
    def is_over(self) -> bool:
        """Whether there was no better one for too long."""
        return self.patience is not None and self.since >= self.patience

    def why(self, step: int, key: str) -> str:
        """That it is over after this step, as a line. key: what the user set."""
        better = f"{self.since} evaluations in a row without a lower eval/loss ({key})"
        return f"complete after step {step}: {better}"


def text_sampler(plan: RunPlan) -> Sampler | None:
    """The function parameters -> text that the model writes after the prompt, one sample a batch shard. None where no
    text is asked for, or no tokenizer is known.

    It is traced here, before the first step: raises `UserError` for a model that cannot be sampled from.
    """
    config, rows, length = plan.config, batch_shards(plan.mesh), plan.config.data.seq_len
    if not config.train.sample_tokens or (tokenizer := tokenizer_of_data(config, plan.source)) is None:
        return None
    if not isinstance(plan.parts.model, ModelDef):
        raise UserError(
            f"train.sample_tokens: {config.train.sample_tokens}, but model.name {config.model.name!r} is a loss, which"
            " gives no logits to sample from; allowed: 0"
        )
    from jaxdist.generation.loop import Generator  # which a run without samples does not need
    from jaxdist.generation.sampling import Sampling, row_keys
    from jaxdist.generation.texts import Ends, complete, ids_of

    prompt = ids_of(config.train.sample_prompt, tokenizer)[: length - 1] or ids_of("\n", tokenizer)
    if not (tokens := min(config.train.sample_tokens, length - len(prompt))):
        return None
    keys = row_keys(config.train.seed, range(rows))
    run = Generator(*forward_parts(plan), Sampling(TEMPERATURE), positions=length, chunk=tokens)
    try:
        run.trace(plan.parts.evaluated, tokens)
    except UserError as error:
        raise UserError(
            f"train.sample_tokens: {config.train.sample_tokens}, but this model cannot be sampled from, which gives it"
            f" batches of inputs alone: {error}; or set train.sample_tokens=0"
        ) from error

    def sample(params: PyTree) -> str:
        try:
            *_, found = complete(run, params, [prompt] * rows, keys, tokens, Ends(tokenizer=tokenizer))
        except UserError as error:  # the loss tells whether training goes on
            return f"no sample: {error}"
        return "\n\n".join(tokenizer.decode([*prompt, *each.ids]) for each in found)

    return sample
