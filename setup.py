"""The description of the package, for who reads it outside of the repository. All else is in pyproject.toml.

It is README.md, whose links and drawings are files beside it: here each of them says where its file is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import Extension, setup

PURE = bool(os.environ.get("AVISO_WORKERS_PURE"))
"""Whether to leave out the functions in C, for a wheel that installs everywhere. Without a compiler they are left out
too."""
RELATIVE_LINK = re.compile(r"!?\[([^\]]+)\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)")

setup(
    long_description=RELATIVE_LINK.sub(r"\1 (`\2`)", Path(__file__).with_name("README.md").read_text()),
    long_description_content_type="text/markdown",
    ext_modules=[] if PURE else [Extension("aviso_workers._fast_c", ["aviso_workers/_fast.c"], optional=True)],
)
