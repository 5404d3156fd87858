"""Hook of mkdocs.yml: formulas become MathML while the site is built.

Browsers draw MathML themselves, so that the site needs no script and no other host.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves in a page in its generic mode.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a rendered page."""
    content = _BLOCK.sub(lambda found: _mathml(found, "block"), content)
    return _INLINE.sub(lambda found: _mathml(found, "inline"), content)


def _mathml(found: re.Match[str], display: str) -> str:
    return convert(html.unescape(found[1]), display=display)
