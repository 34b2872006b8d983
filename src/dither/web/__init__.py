"""The page that shows runs, plans and privacy; `dither web` serves it. Everything comes from this machine.

folders   what of the runs folder may be read, and nothing else
index     the runs of a folder, read again only where a file changed
details   one run: what its folder says, made ready to be shown
analysis  one run, computed: cohorts, noise, ε by round and by client
plans     the noise a budget asks for, fast enough for a slider
reports   pages made by `dither reproduce`
live      changes pushed to open pages
guard     tokens, host names, headers
app       the addresses
static/   the page itself: HTML, CSS and JavaScript, no framework, no outside host

A run's folder may come from anybody. So nothing in it is executed: its spec is read as plain TOML (a `Spec` would
import a method's own file), its texts reach the page as JSON and are shown as text, never as HTML.
"""
