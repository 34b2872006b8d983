"""The page that shows runs, plans and privacy; `dither web` serves it. Everything comes from this machine.

app        the addresses
guard      who may ask: tokens, host names, headers
files      what may be read of a folder that anybody may have written
index      the table of runs, read again only where a file changed, and pushed to open pages
run_page   one run: what its folder says, with ε explained
analysis   one run, computed: cohorts, noise, ε by round and by client
plan_page  the noise that a budget needs, fast enough for a slider
static/    the page itself: HTML, CSS and JavaScript, no framework, no outside host

A run's folder may come from anybody, so nothing in it is executed. Its spec is read as plain TOML (a `Spec` would
import a method's Python file); its texts reach the page as JSON and are shown as text, never as HTML.
"""
