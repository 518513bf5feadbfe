"""JupyterLab as `make lab` opens it: pairs as notebooks, this environment's kernel, the landing notebook first."""

import os

c = get_config()  # noqa: F821  (Jupyter defines it)

# What is saved in a notebook is written to its .py too, and an edited .py is what its notebook opens with.
c.ServerApp.contents_manager_class = "jupytext.TextFileContentsManager"
c.LabApp.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
# The kernel of the environment that Lab was started from, and no other of the same user's.
c.MultiKernelManager.default_kernel_name = "python3"
c.KernelSpecManager.allowed_kernelspecs = {"python3"}
# In a container one is often root, and Jupyter would refuse to start.
c.ServerApp.allow_root = os.geteuid() == 0
