"""jaxdist: train any Flax model on any number of GPUs, with every byte of communication in sight.

The names below are public. They are imported when first used: before that, neither JAX nor Flax starts.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist import checkpoint as checkpoint
    from jaxdist import collectives as collectives
    from jaxdist import data as data
    from jaxdist import nn as nn
    from jaxdist import optim as optim
    from jaxdist import precision as precision
    from jaxdist import runtime as runtime
    from jaxdist.config.load import load_config as load_config
    from jaxdist.config.schema import Config as Config
    from jaxdist.config.sections.grad_sync import GradSync as GradSync
    from jaxdist.distill.divergence import distill_loss as distill_loss
    from jaxdist.errors import UserError as UserError
    from jaxdist.generation.generate import generate as generate
    from jaxdist.init import init_state as init_state
    from jaxdist.init import state_target as state_target
    from jaxdist.launcher.spawn import SpawnError as SpawnError
    from jaxdist.launcher.spawn import spawn as spawn
    from jaxdist.mesh import make_mesh as make_mesh
    from jaxdist.model import ModelDef as ModelDef
    from jaxdist.nn import model_def as model_def
    from jaxdist.optim.make import make_optimizer as make_optimizer
    from jaxdist.optim.per_block import per_block as per_block
    from jaxdist.parallel.batch_mean import batch_mean as batch_mean
    from jaxdist.parallel.modules.linen_modules import linen_loss as linen_loss
    from jaxdist.parallel.modules.nnx_modules import nnx_loss as nnx_loss
    from jaxdist.parallel.modules.nnx_modules import nnx_update as nnx_update
    from jaxdist.parallel.options import StepOptions as StepOptions
    from jaxdist.parallel.options import StrategyOptions as StrategyOptions
    from jaxdist.parallel.schedule import Program as Program
    from jaxdist.parallel.strategy import Strategy as Strategy
    from jaxdist.plan.traced.ledger import ledger as ledger
    from jaxdist.plan.traced.sharding import sharding_table as sharding_table
    from jaxdist.plan.verify import verify as verify
    from jaxdist.precision.policy import Precision as Precision
    from jaxdist.pretrained.open import open_pretrained as open_pretrained
    from jaxdist.specs import BATCH_SPEC as BATCH_SPEC
    from jaxdist.state import TrainState as TrainState
    from jaxdist.step import make_train_step as make_train_step
    from jaxdist.train_step import TrainStep as TrainStep
    from jaxdist.trainer.fit import FitResult as FitResult
    from jaxdist.trainer.fit import fit as fit

__version__ = "0.1.0"

_HOME = {
    "BATCH_SPEC": "jaxdist.specs",
    "Config": "jaxdist.config.schema",
    "FitResult": "jaxdist.trainer.fit",
    "GradSync": "jaxdist.config.sections.grad_sync",
    "ModelDef": "jaxdist.model",
    "Precision": "jaxdist.precision.policy",
    "Program": "jaxdist.parallel.schedule",
    "SpawnError": "jaxdist.launcher.spawn",
    "Strategy": "jaxdist.parallel.strategy",
    "StepOptions": "jaxdist.parallel.options",
    "StrategyOptions": "jaxdist.parallel.options",
    "TrainState": "jaxdist.state",
    "TrainStep": "jaxdist.train_step",
    "UserError": "jaxdist.errors",
    "batch_mean": "jaxdist.parallel.batch_mean",
    "distill_loss": "jaxdist.distill.divergence",
    "fit": "jaxdist.trainer.fit",
    "generate": "jaxdist.generation.generate",
    "init_state": "jaxdist.init",
    "ledger": "jaxdist.plan.traced.ledger",
    "linen_loss": "jaxdist.parallel.modules.linen_modules",
    "load_config": "jaxdist.config.load",
    "make_mesh": "jaxdist.mesh",
    "make_optimizer": "jaxdist.optim.make",
    "make_train_step": "jaxdist.step",
    "model_def": "jaxdist.nn",
    "nnx_loss": "jaxdist.parallel.modules.nnx_modules",
    "nnx_update": "jaxdist.parallel.modules.nnx_modules",
    "per_block": "jaxdist.optim.per_block",
    "open_pretrained": "jaxdist.pretrained.open",
    "sharding_table": "jaxdist.plan.traced.sharding",
    "spawn": "jaxdist.launcher.spawn",
    "state_target": "jaxdist.init",
    "verify": "jaxdist.plan.verify",
}

_FOLDERS = ("checkpoint", "collectives", "data", "nn", "optim", "precision", "runtime")

__all__ = [*_HOME, *_FOLDERS]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"jaxdist.{name}")
    if name not in _HOME:
        from jaxdist.errors import nearest

        near = nearest(name, __all__)
        hint = f"; did you mean {near!r}?" if near else ""
        raise AttributeError(f"module 'jaxdist' has no attribute {name!r}{hint}", name=name, obj=sys.modules["jaxdist"])
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
