"""The incident book: situations that an operator meets, made for real, and what each command and alert says of them.

`cluster` runs three servers, `agents` is the app of the worker processes, `prometheus` has the shipped alerts with
shortened waits, and `operator` runs the commands that an operator would run. `situations` has the situations, each with
what it expects; `book` makes them one after the other and compares; `page` writes docs/operations/incidents.md.
`healthy` looks at a busy cluster in which nothing is wrong, with the app of `fleet`.
"""
