"""For the site alone: a link that leaves docs/ (to a source file, say) becomes the file's path as text.

On a code host such links work; a site has no such pages. That they exist is held by tests/test_docs.py.
"""

import posixpath
import re

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown, page, **_):
    """Rewrite the links of one page."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(match):
        target = posixpath.normpath(posixpath.join("docs", folder, match[2]))
        if target.startswith("docs/"):
            return match[0]
        text = match[1].strip("`")
        return f"`{target}`" if text in target else f"{match[1]} (`{target}`)"

    return LINK.sub(rewritten, markdown)
