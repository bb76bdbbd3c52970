"""Where the teacher's logits of a run come from: a `Teacher` that computes them before each step, or a cache.

Both have the same functions, which a run calls in this order: `step` where its parts are made, `begin` before its state
is restored, and `batches` for its loader.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxdist.config.rules.fields import show
from jaxdist.config.schema import Config, ParallelConfig
from jaxdist.config.sections.optimizer import LoraConfig, OptimizerConfig
from jaxdist.config.sections.precision import PrecisionConfig
from jaxdist.data.loader import GlobalBatches
from jaxdist.distill.cache import (
    Kept,
    cached_leaves,
    check_cache,
    check_samples,
    new_kept,
    open_cache,
    samples_of,
    with_cached_logits,
    write_cache,
)
from jaxdist.distill.model import Mixture, vocabulary_of
from jaxdist.distill.step import Joint, join, of_student
from jaxdist.distill.teacher import Teacher, top_program
from jaxdist.errors import UserError
from jaxdist.files.user_path import user_path
from jaxdist.mesh import AnyMesh
from jaxdist.model import ModelDef
from jaxdist.parallel.options import StepOptions
from jaxdist.pretrained import open_pretrained
from jaxdist.pretrained.source import Say
from jaxdist.specs import BATCH_SPEC, PyTree
from jaxdist.train_step import TrainStep

TEACHER_KEY = "distill.teacher"
ForwardOnly = Callable[[Config, AnyMesh], tuple[Any, StepOptions]]  # `jaxdist.build.forward_only`


def teaching_of(config: Config, mesh: AnyMesh, forward_only: ForwardOnly) -> "Live | Cached":
    """The teaching that section distill asks for. Reads no parameters. Raises `UserError` for what does not fit."""
    if config.distill.cache is not None:
        folder = user_path(config.distill.cache, key="distill.cache")
        return Cached(config, folder, open_cache(folder))
    return Live(config, load_teacher(config, mesh, forward_only))


def load_teacher(config: Config, mesh: AnyMesh, forward_only: ForwardOnly) -> Teacher:
    """The teacher of a configuration, in its own strategy and precision. Its parameters are not read yet."""
    asked = config.distill
    if asked.teacher is None:
        raise UserError(f"{TEACHER_KEY}: null; allowed: a run directory, a step's folder or a Hugging Face folder")
    with open_pretrained(asked.teacher, key=TEACHER_KEY, ema=asked.ema) as found:
        model, positions, lora = found.model, found.positions, found.lora
    if model is None:
        raise UserError(
            f"{TEACHER_KEY}: {show(asked.teacher)} does not say of what architecture it is; allowed: a run directory, a"
            " step's folder, or a Hugging Face folder with a config.json"
        )
    if positions is not None and positions < config.data.seq_len:
        raise UserError(
            f"data.seq_len: {config.data.seq_len}, but the teacher {show(asked.teacher)} has {positions} positions;"
            f" allowed: at most {positions}; or another distill.teacher"
        )
    other = replace(
        config,
        model=model,
        data=config.data.replace(seq_len=positions or config.data.seq_len),
        precision=config.precision if asked.precision is None else PrecisionConfig(policy=asked.precision),
        parallel=ParallelConfig(strategy=asked.strategy, min_shard_bytes=config.parallel.min_shard_bytes),
        optimizer=OptimizerConfig(lora=lora or LoraConfig()),
    )
    built, options = forward_only(other, mesh)
    if not isinstance(built, ModelDef):
        raise UserError(
            f"{TEACHER_KEY}: {show(asked.teacher)} is a loss of its own, which gives no logits; allowed: gpt, bert"
        )
    return Teacher(built, mesh, options, key=f"{TEACHER_KEY}: {show(asked.teacher)}")


def mixture_of(config: Config) -> Mixture:
    """What section distill says of the loss."""
    return Mixture(config.distill.temperature, config.distill.mixing, config.model.loss_chunk)


def check_student(student: Any) -> ModelDef:
    """The student. Raises `UserError` for a loss in place of a model."""
    if not isinstance(student, ModelDef):
        raise UserError(
            f"{TEACHER_KEY}: the student is a loss of its own, which gives no logits; use jaxdist.distill_loss, and"
            " leave the section distill out (docs/distillation.md)"
        )
    return student


@dataclass
class Live:
    """A teacher that computes before each step."""

    config: Config
    teacher: Teacher
    joint: Joint | None = None  # from `step` on

    @property
    def target(self) -> PyTree:
        """The teacher's own parameters as ShapeDtypeStructs with shardings."""
        return self.teacher.target

    def step(
        self, student: Any, optimizer: optax.GradientTransformation, mesh: AnyMesh, options: StepOptions
    ) -> TrainStep:
        """The step of the student."""
        given = check_student(student), self.teacher, optimizer, mesh, options
        self.joint = join(*given, mixture_of(self.config))
        return of_student(self.joint, mesh, options)

    def begin(self, identity: dict[str, Any], say: Say) -> str:
        """Read the teacher's parameters. Returns their digest."""
        return read_teacher(self.config, self.teacher, say)

    def batches(self, loader: GlobalBatches) -> GlobalBatches:
        """The loader as it is."""
        return loader


def read_teacher(config: Config, teacher: Teacher, say: Say) -> str:
    """Read the parameters into the teacher's layout. Returns their digest."""
    asked = config.distill
    assert asked.teacher is not None
    with open_pretrained(asked.teacher, key=TEACHER_KEY, ema=asked.ema) as found:
        digest = found.digest()
        teacher.params = found.load(teacher.target, say=say)
        say(f"teacher: {found.described}, {teacher.model.parameters:,} parameters, {digest[:12]}")
    return digest


@dataclass
class Cached:
    """The largest logits of a teacher that has computed them before."""

    config: Config
    folder: Path
    kept: Kept
    vocab: int = 0
    joint: Joint | None = None  # from `step` on
    target: PyTree = ()  # no parameters

    def step(
        self, student: Any, optimizer: optax.GradientTransformation, mesh: AnyMesh, options: StepOptions
    ) -> TrainStep:
        """The step of the student."""
        model = check_student(student)
        self.vocab = vocabulary_of(model, "model.name: the student")[0].shape[0]
        self.check(self.kept.data)
        leaves = cached_leaves(self.kept, self.config.data.global_batch, NamedSharding(mesh, BATCH_SPEC))
        self.joint = join(model, leaves, optimizer, mesh, options, mixture_of(self.config))
        return of_student(self.joint, mesh, options)

    def check(self, data: dict[str, Any]) -> None:
        """Raise `UserError` for a cache that does not fit the run."""
        temperature = self.config.distill.temperature
        check_cache(self.kept, folder=self.folder, data=data, temperature=temperature, vocab=self.vocab)

    def begin(self, identity: dict[str, Any], say: Say) -> str:
        """Check that the cache is of the samples of this run. Returns the digest of the teacher that made it."""
        self.check(samples_of(identity))
        check_samples(self.kept, self.folder, self.config.train.steps * self.config.data.global_batch)
        asked = self.config.distill
        if asked.teacher is not None:
            with open_pretrained(asked.teacher, key=TEACHER_KEY, ema=asked.ema) as found:
                digest = found.digest()
            if digest != self.kept.teacher:
                raise UserError(
                    f"{TEACHER_KEY}: {show(asked.teacher)} is not the teacher that distill.cache was made with (digest"
                    f" {digest[:12]}, not {self.kept.teacher[:12]}); leave it out, or make another cache"
                )
        kept = self.kept
        say(f"teacher: the {kept.top_k} largest of {kept.vocab} logits of {kept.samples:,} samples in {self.folder}")
        return kept.teacher

    def batches(self, loader: GlobalBatches) -> GlobalBatches:
        """The loader, whose batches have the cached logits besides."""
        return with_cached_logits(loader, self.folder, self.kept)


def make_cache(
    config: Config, teacher: Teacher, loader: GlobalBatches, identity: dict[str, Any], say: Say, *, every: int = 20
) -> Kept:
    """Write `distill.cache` for all steps of a run. Returns what its manifest says.

    every: batches between lines of progress.
    """
    asked = config.distill
    assert asked.cache is not None
    digest, steps = read_teacher(config, teacher, say), config.train.steps
    kept = new_kept(
        teacher=digest,
        temperature=asked.temperature,
        data=samples_of(identity),
        samples=steps * config.data.global_batch,
        length=config.data.seq_len,
        top_k=asked.top_k,
        vocab=teacher.table[0].shape[0],
    )
    top = top_program(teacher, top_k=kept.top_k, temperature=asked.temperature, chunk=config.model.loss_chunk)

    def rows() -> Any:
        for step in range(steps):
            found = top(loader.batch(step))
            yield {name: np.asarray(leaf) for name, leaf in jax.device_get(found).items()}
            if (step + 1) % every == 0 or step + 1 == steps:
                say(f"distill: {step + 1} of {steps} batches")

    write_cache(user_path(asked.cache, key="distill.cache"), kept, rows())
    return kept
