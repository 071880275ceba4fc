"""How long tests wait for what must come."""

from __future__ import annotations

PATIENCE_SECONDS = 120.0
"""How long a test waits for what must come. What comes ends the wait, so that the bound costs nothing; it is generous
because other work on the machine is not a mistake of the code."""

PROMPT_SECONDS = 20.0
"""How long what happens at once may take beside other work. The test sees to it that the alternative takes longer: it
asks for timeouts of many minutes where something is not to wait for them."""

LONG_SECONDS = 600.0
"""A timeout or a piece of work that no test waits for."""
