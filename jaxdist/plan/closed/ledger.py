"""The closed-form ledger: what a device sends in a step, without a trace of the step.

It is made of what files say beside their code: a strategy when it moves its shards (`sends`), a schedule how often its
stages run (`table`, or `sends`), a collective algorithm what a call costs (`cost`); of the parameters at rest
(`Known.leaves`); and of what one microbatch sends (`jaxdist.plan.closed.microbatch`), which is traced once for each
form of the layers. A test compares it with the ledger of the traced step.

Bytes are exact on every axis. Calls are exact but for hand-written algorithms, whose messages count one a round.

What has no closed form is traced whole: a loss of somebody else's, a strategy or schedule without `sends`, distillation
and replicas that train by themselves.
"""

import functools
import importlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxdist import registry
from jaxdist.build import assemble, prefetches_on, step_options, with_teacher
from jaxdist.collectives.algorithm import get_algorithm
from jaxdist.collectives.algorithms.auto import choose
from jaxdist.collectives.bucket import plan_buckets
from jaxdist.collectives.compression import encoded_bytes
from jaxdist.collectives.cost import make_link
from jaxdist.collectives.group import Group
from jaxdist.config.entries import ModelFacts, ScheduleFacts
from jaxdist.config.schema import Config
from jaxdist.config.sections.grad_sync import GradSync
from jaxdist.mesh import AXES, BATCH_LIKE
from jaxdist.parallel.options import StepOptions
from jaxdist.parallel.pipeline.table import table_of
from jaxdist.parallel.wrappers.reduce_in_backward import summed_in_backward
from jaxdist.plan.closed.leaves import Known, mesh_sizes, planned_mesh
from jaxdist.plan.closed.sent import Sent
from jaxdist.specs import SHARD_AXES, STACKED, UNITS, claimed_axes, dim_of, fitting, shard_of, spec_axes
