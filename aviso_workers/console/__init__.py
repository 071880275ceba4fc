"""The console: pages for operators that say what needs them, why, and let them act. `aviso-workers console` serves it.

`web` takes a request, `access` says whose it is and what that user may do, `pages` makes what is shown of what `ops`
reports, `actions` does what a user confirms and keeps a record of it (`audit`). `templates` are the pages. Needs the
extra `console`.
"""
