from dist_transformer.reporting.html.markup import Html, element, join, text


def test_text_is_escaped_and_markup_is_not() -> None:
    assert text("a < b & 'c' \"d\"") == "a &lt; b &amp; &#x27;c&#x27; &quot;d&quot;"
    assert text(3.5) == "3.5"
    assert text(Html("<br>")) == "<br>"
    assert join("<", element("b", "<"), 1) == "&lt;<b>&lt;</b>1"


def test_what_is_made_of_text_is_text_again() -> None:
    # `str` methods give plain strings: whatever is cut or joined is escaped when it is used.
    assert text(Html("<i>") + "<b>") == "&lt;i&gt;&lt;b&gt;"


def test_elements() -> None:
    assert element("td", "x", class_="wide", data_label='"', lang=None) == '<td class="wide" data-label="&quot;">x</td>'
    assert element("svg", viewBox="0 0 1 1") == '<svg viewBox="0 0 1 1"></svg>'
    assert element("meta", name="<") == '<meta name="&lt;">'
    assert isinstance(element("p"), Html)
