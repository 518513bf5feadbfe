"""Settings of JupyterLab under `make lab`: paired notebooks, the kernel of this environment, and the start notebook."""

import os

c = get_config()  # noqa: F821  (Jupyter defines it)

# Saving a notebook also writes its .py, and opening a notebook reads its edited .py.
c.ServerApp.contents_manager_class = "jupytext.TextFileContentsManager"
c.LabApp.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
# Only the kernel of this environment, not other kernels of the same user.
c.MultiKernelManager.default_kernel_name = "python3"
c.KernelSpecManager.allowed_kernelspecs = {"python3"}
# Containers often run as root, where Jupyter refuses to start otherwise.
c.ServerApp.allow_root = os.geteuid() == 0
