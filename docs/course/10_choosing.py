"""Lesson 10: from a model, devices and a limit of memory to a strategy: python docs/course/10_choosing.py"""

# %% [markdown]
# # 10. Choosing
#
# You know all parts now. Which do you take? First a rule of thumb, then figures for the model at hand, which are
# better than any rule. The rule is that of the lecture notes with which this library began; its line for a model that
# fits, over slow links, is ours.

# %%
from _course import bars, devices, quickstart, show

from jaxdist.config.load import load_config
from jaxdist.plan.explain import ESTIMATED_PEAK, explain

devices()


def choose(*, nodes, fits_one_device, fast_links=True, layer_fits=True):
    """The strategy that the rule of thumb names."""
    if nodes == 1:
        if fits_one_device:
            return "ddp"
        return "pipeline" if layer_fits else "tensor"
    if fast_links:
        return "zero"
    return "ddp" if fits_one_device else "ddp + pipeline + tensor + zero1"


# %% [markdown]
# | situation | take | because |
# |---|---|---|
# | one node, the model fits on one device | `ddp` | ZeRO sends as much or more, for memory that you have |
# | one node, it does not fit | pipeline, then ZeRO, then tensor | a pipeline sends least, ZeRO asks for no change |
# | one node, even one layer does not fit | tensor | ZeRO gathers a layer whole, unless it just fits |
# | several nodes, fast links | ZeRO | no change of the model |
# | several nodes, slow links, it fits on one device | `ddp`, with lesson 9's remedies | one sum crosses slow links |
# | several nodes, slow links, it does not | ddp + pipeline + tensor + zero1 | little crosses the slow links |

# %%
cases = {
    "one node, fits": {"nodes": 1, "fits_one_device": True},
    "one node, does not fit": {"nodes": 1, "fits_one_device": False},
    "4 nodes, fast links": {"nodes": 4, "fits_one_device": False},
    "4 nodes, slow links, does not fit": {"nodes": 4, "fits_one_device": False, "fast_links": False},
}
for name, case in cases.items():
    print(f"{name}: {choose(**case)}")

# %% [markdown]
# A rule does not know your model. `explain` does: it traces the step and tells, for each layout, what a device needs
# at the peak of a step and what it sends. Nothing is run or compiled, and the devices need not exist. (The command
# line has it as `python scripts/explain.py --config FILE`.)

# %%
model = ["model.width=256", "model.layers=4", "data.seq_len=64", "data.global_batch=16", "optimizer.name=adamw"]


def layout(mesh, *overrides):
    """(MiB of a device at the peak, MiB that it sends in a step), both from the traced program."""
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | mesh
    axes = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
    found = explain(load_config(quickstart(), [*model, "parallel.prefetch=0", *axes, *overrides]))
    return found.memory[ESTIMATED_PEAK] / 2**20, found.ledger.wire_bytes / 2**20


ddp, zero3 = "parallel.strategy=ddp", "parallel.strategy=zero3"
pipeline = ("parallel.schedule=one_f_one_b", "parallel.microbatches=8")
layouts = {
    "ddp": ({"data": 8}, ddp),
    "zero1": ({"fsdp": 8}, "parallel.strategy=zero1"),
    "zero3": ({"fsdp": 8}, zero3),
    "zero3, remat": ({"fsdp": 8}, zero3, "memory.remat=full"),
    "tensor": ({"data": 2, "tensor": 4}, ddp),
    "pipeline": ({"data": 2, "pipe": 4}, ddp, *pipeline),
}
table = {name: layout(*overrides) for name, overrides in layouts.items()}
for name, (peak, sent) in table.items():
    print(f"{name:12}: {peak:5.1f} MiB at the peak, sends {sent:5.1f} MiB a step")


# %% [markdown]
# Now the decision: of the layouts that fit, the one that sends least. A limit of memory decides which these are. (On
# real hardware also ask *where* it sends: lesson 9. And a pipeline sends little, but has a bubble: lesson 8.)


# %%
def cheapest(table, limit):
    """The name of the layout that sends least among those within the limit; None if there is none."""
    fitting = [name for name, (peak, _) in table.items() if peak <= limit]
    return min(fitting, key=lambda name: table[name][1], default=None)


for limit in (100, 50, 25, 18, 10):
    print(f"limit {limit:3} MiB: {cheapest(table, limit)}")
assert table["zero3"][0] < table["ddp"][0] and table["zero3, remat"][0] < table["zero3"][0]
assert cheapest(table, 1) is None

# %% [markdown]
# When nothing fits, use the remedies of lesson 1 before you buy. `python scripts/explain.py --config FILE --remedies`
# tries each change alone, compiles it, and lists what it saves and costs. Above, one of them is in the table:
# `remat`.

# %%
show(bars("Peak memory of a device, 8 devices", {name: {"peak": peak} for name, (peak, _) in table.items()}, "MiB"))

# %% [markdown]
# ## What you learned
# - The rule of thumb: does it fit one device, does one layer fit, are the links fast?
# - Better than a rule: `explain` for each layout, then the cheapest that fits.
# - Try remedies (remat, accumulation, bf16) before more devices.
#
# ## Exercise
# Measured by `explain`, in GiB at the peak and GiB sent: ddp (70, 2.0), zero1 (52, 2.0), zero2 (44, 4.5), zero3 (21,
# 6.0), tensor (38, 9.0). A device has 48 GiB. Which one do you take?
#
# Check: `python docs/course/check.py 10 ANSWER`
