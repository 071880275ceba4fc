"""The documentation as a site: `pages` gathers what is written, `configuration`, `command_line`, `python_names` and
`state` write the reference from the code, Zensical makes HTML of both, `llms_txt` adds the Markdown of each page, and
`built_site` looks at the HTML. `checks` writes the reference of the doctor's checks into docs/operations/checks.md.
"""
