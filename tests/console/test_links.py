"""Addresses in what agents and people wrote: those that lead somewhere can be clicked, nothing else becomes markup."""

from __future__ import annotations

import pytest

from audit.templatetags.words import linked, ref_link

LINK = '<a href="{0}" rel="noopener noreferrer nofollow" target="_blank">{0}</a>'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("Look at http://erp.test/orders/7.", f"Look at {LINK.format('http://erp.test/orders/7')}."),
        ("(https://erp.test/7)", f"({LINK.format('https://erp.test/7')})"),
        ("见 https://erp.test/7。", f"见 {LINK.format('https://erp.test/7')}。"),
        ("said: “see https://erp.test/7”", f"said: “see {LINK.format('https://erp.test/7')}”"),
        ("javascript:alert(1)", "javascript:alert(1)"),
        ("erp.com and bob@erp.com", "erp.com and bob@erp.com"),
        ("<b>5 & 6</b>", "&lt;b&gt;5 &amp; 6&lt;/b&gt;"),
    ],
)
def test_only_whole_web_addresses_in_plain_text_become_links(text: str, html: str) -> None:
    assert linked(text) == html


def test_an_address_cannot_break_out_of_its_link() -> None:
    html = linked('http://erp.test/"onmouseover="alert(1) http://erp.test/<script>')
    assert 'onmouseover="' not in html.replace("&quot;", "'")
    assert "<script" not in html


def test_a_reference_outside_is_a_link_only_where_it_leads_somewhere_safe() -> None:
    ref = {"system": "erp", "type": "order", "id": "PO-7"}
    assert 'href="https://erp.test/7"' in str(ref_link({**ref, "url": "https://erp.test/7"}))
    assert "<a" not in str(ref_link({**ref, "url": "javascript:alert(1)"}))
    assert "PO-7" in str(ref_link(ref))
