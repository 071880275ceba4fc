"""Options by which a JVM of Spark starts soon.

Half of the work of a short program of Spark is to read and verify classes. A JVM can store those that it has at its
end, and others with the same class path begin with them (JEP 350). The first session of tests in a virtual environment
stores them there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pyspark

LITTLE_COMPILATION = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ERRORS_ONLY = "-Xlog:disable -Xlog:all=error:stderr"
"""Without it a JVM tells of stored classes that it cannot use on standard output, among what a program prints."""


def quick_jvm() -> str:
    """Return the options, with the stored classes if there are any."""
    stored = _stored()
    return (
        f"{LITTLE_COMPILATION} {ERRORS_ONLY} -XX:SharedArchiveFile={stored}" if stored.exists() else LITTLE_COMPILATION
    )


def storing_classes() -> str:
    """Return the options of a JVM that stores its classes at its end, if none are stored yet."""
    if _stored().exists():
        return quick_jvm()
    return f"{LITTLE_COMPILATION} {ERRORS_ONLY} -XX:ArchiveClassesAtExit={_being_stored()}"


def keep_classes() -> None:
    """Let others use the classes that a JVM of this process has stored, if it has."""
    if _being_stored().exists():
        _being_stored().replace(_stored())


def _stored() -> Path:
    """Return the file for this Java and this Spark: of others, a JVM takes none."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    described = f"{java.resolve()} {java.stat().st_mtime_ns if java.exists() else 0} {pyspark.__version__}"
    return Path(sys.prefix) / f"spark-{hashlib.sha256(described.encode()).hexdigest()[:16]}.jsa"


def _being_stored() -> Path:
    return _stored().with_suffix(f".{os.getpid()}")
