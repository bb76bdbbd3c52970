"""PyTorch's DataParallel, and its balanced form, as one program that drives several devices.

`jaxdist lab data-parallel` runs it beside `ddp`. In SPMD every device runs one program with buffers of the same sizes.
So no step of jaxdist can show how unlike the loads of the devices are when one of them gathers for all.
"""
