"""What is wrong with a loss: its causes, each with the remedy, and what a verification returns."""

from collections.abc import Iterable
from typing import NamedTuple

# {cause: (what it is, the remedy)}
CAUSES = {
    "data-dependent shape": (
        "the program depends on values of the batch",
        "choose by jnp.where, leave rows out by weights of 0, and give shapes as numbers",
    ),
    "numpy on a traced value": (
        "NumPy is given a value that is known when the step runs only, to compute on or to index an array by",
        "call the function of jax.numpy; make an array that is indexed one of JAX: jnp.asarray(table)[ids]",
    ),
    "program differs at each trace": (
        "two traces of the loss differ: it reads something that is no argument (numpy.random, time, a counter), and"
        " processes may run different programs",
        "draw random numbers from keys, and put everything else that changes into the batch",
    ),
    "collective": ("the loss asks for other devices", "return the (sum, weight) of these rows; jaxdist adds them up"),
    "host callback": (
        "code of the host runs in the loss, and nothing says that it returns the same on every device",
        "compute it in JAX, or before the step as a leaf of the batch",
    ),
    "randomness without keys": (
        "random numbers that do not come from keys: the same at every step, and another mask for a row in each layout",
        "draw from keys, one of each row: jax.vmap(draw)(keys)",
    ),
    "one key for all samples": (
        "the key of one row draws for the others too, and each device has another first row",
        "draw for each row from its own key: jax.vmap(draw)(keys); nnx_loss and linen_loss: per_sample=True",
    ),
    "closed-over rows": (
        "an array with an entry for each row of the batch is closed over, and is not split over devices with them",
        "put it into the batch",
    ),
    "fixed number of rows": (
        "the loss runs with this number of rows only, and a device has fewer",
        "take the number from the batch: x.shape[0]",
    ),
    "order dependence": (
        "a sample's loss depends on its place in the batch, or on the samples beside it, which differ on each device",
        "read the row alone; a position that matters is a leaf of the batch",
    ),
    "batch statistics": (
        "a statistic of these rows alone, where each device has others, changes the loss of a sample, or is made into a"
        " loss that is no sum over samples, as a Dice loss is",
        "take jaxdist.batch_mean, which is over all devices (in a loss of your own), or a norm over features",
    ),
    "other samples of the batch": (
        "a sample's loss reads other samples of this device, as a contrastive loss does, and each device has others",
        "compare with samples of the same row: put the negatives into the batch",
    ),
    "sort or top-k over the batch": (
        "samples are ranked among the rows of this device, and each device has others",
        "choose by a threshold, or rank before the step and give weights in the batch",
    ),
    "mean of means": (
        "the loss is a mean over the rows of each device, which weighs every device and microbatch alike, or as the"
        " weight says, and not every sample",
        "return the sum, and as the weight what it is to be divided by: losses.sum(), losses.size",
    ),
    "constant weight": (
        "the weight is the same however many rows there are, and jaxdist adds up one for each device and microbatch",
        "return what is counted over these rows, such as losses.size or mask.sum()",
    ),
    "weight of parameters": (
        "the weight depends on parameters, and no gradient flows through it: the step differentiates the sum alone",
        "return a weight that counts rows, and divide in the loss: n * jaxdist.batch_mean(losses, weights), n",
    ),
    "penalty in each call": (
        "the sum has a term that does not grow with the rows, such as weight decay, and is added once for each device"
        " and microbatch",
        "multiply it by the weight that you return",
    ),
    "metric of these rows": (
        "a metric of the loss is another in this layout, since its sum or its weight is not that of the rows",
        'return the sum over these rows, and how many were counted: {"accuracy": (right.sum(), right.size)}',
    ),
    "does not add up": (
        "the sum or the weight of the batch is not that of its parts together",
        "a loss returns sums over its rows: docs/own_loss.md",
    ),
    "same call, other bits": ("the same call returns other numbers", "leave out what is not deterministic"),
    "refused": ("", ""),
    "layouts differ": ("this layout trains otherwise than one device", ""),
}


class Fault(NamedTuple):
    """A cause, in one line by `str`.

    cause: a key of `CAUSES`
    where: lines of the user's code, such as "loss.py:12"
    detail: what was seen, beside what the cause says
    """

    cause: str
    where: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        what, remedy = CAUSES[self.cause]
        place = ", ".join(self.where) + ": " if self.where else ""
        told = "; ".join(each for each in (what, self.detail) if each)
        return f"{place}{self.cause}: {told}" + (f"; remedy: {remedy}" if remedy else "")


def together(findings: Iterable[Fault]) -> list[Fault]:
    """One finding for each cause, with all its lines, in the order of the first."""
    found: dict[str, Fault] = {}
    for each in findings:
        known = found.setdefault(each.cause, each)
        lines = dict.fromkeys((*known.where, *each.where))
        found[each.cause] = known._replace(where=tuple(lines))
    return list(found.values())


class Verification(NamedTuple):
    """What `jaxdist.verify` returns; its text by `str`.

    findings: a line for each cause, the root first; empty where the layout trains as one device
    compared: what was compared, and how far apart it was
    precision: the numbers that were computed with, and where the user's code narrows them
    """

    findings: list[Fault]
    compared: tuple[str, ...] = ()
    precision: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        verdict = f"{len(self.findings)} found" if self.findings else "clean: this layout trains as one device does"
        return "\n".join([*map(str, self.findings), *self.compared, *filter(None, [self.precision]), verdict])
