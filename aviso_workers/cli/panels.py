"""The commands by the sections of the help: where each is declared, and what it does in one sentence.

So the help of `aviso-workers` needs none of the modules that declare its commands, whose imports take most of a second.
"""

from __future__ import annotations

PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Run": {"new": ("new",), "worker": ("worker",), "dev": ("dev",), "check": ("check",)},
    "Use": {"notify": ("notify",), "watch": ("watch",), "replay": ("watch",)},
    "Agents": {
        "agents": ("agents", "agents_control"),
        "dead-letters": ("dead_letters",),
        "timers": ("timers",),
    },
    "Observe": {"console": ("console",), "doctor": ("doctor",), "top": ("report",), "report": ("report",)},
    "Data": {
        "streams": ("streams", "streams_policy", "streams_maintenance", "streams_copy"),
        "consumers": ("consumers",),
        "delete": ("delete",),
        "erase": ("erase",),
        "backup": ("backup",),
        "mirror": ("mirror",),
    },
    "Server": {"server": ("server",), "config": ("config",)},
    "Spark": {"spark": ("spark", "spark_pipelines")},
}
"""The sections of the help, with each command or group of commands and the modules of this package that declare it: the
first has it under its name, the others add commands to the group."""
COMMANDS = {name: modules for panel in PANELS.values() for name, modules in panel.items()}
SUMMARIES = {
    "new": "Create a small working project, with an agent, its tests and the files that deploy it.",
    "worker": "Run the agents of an app until SIGTERM or Ctrl-C.",
    "dev": "Run an app's agents beside a nats-server of their own, for development.",
    "check": "List every mistake in an app and its configuration.",
    "notify": "Publish one notification, or those of a file, and wait until the server has stored them.",
    "watch": "Print notifications as they come, until Ctrl-C.",
    "replay": "Print stored notifications, from the first to the last unless other positions are given.",
    "agents": "Show the progress of agents, and pause, reset or remove them.",
    "dead-letters": "List dead letters, return them to the agents that failed, or erase them.",
    "timers": "Show when timers run, pause them, and run one now.",
    "console": "Serve pages that say what needs an operator, and why, until SIGTERM or Ctrl-C.",
    "doctor": "Check servers, streams, consumers and settings for known problems, and say what to do about each.",
    "top": "Show streams and consumers as they change, until Ctrl-C.",
    "report": "Report on streams, mirrors and the account.",
    "streams": "Show, plan, change and remove streams.",
    "consumers": "List, show, remove and unpin the consumers of any stream.",
    "delete": "Delete one notification, after showing which one it is.",
    "erase": "Erase notifications for good, wherever this account keeps them: also their copies and dead letters.",
    "backup": "Back up streams with their consumers, in the layout of the nats CLI, and restore them.",
    "mirror": "Promote mirrors, fence streams, and rehearse a failover.",
    "server": "Run nats-servers for development, and write nats-server.conf, from the configuration's section server.",
    "config": "Print the configuration in effect, its JSON Schema, an app as AsyncAPI, and the shipped files.",
    "spark": "Archive, backfill and report with Spark, and compare its jobs with their notifications.",
}
"""The first sentence of the help of each."""
