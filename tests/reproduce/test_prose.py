"""Documentation to paragraphs: what is kept of each format, and what is not."""

from mlm.reproduce.prose import READERS, Paragraph, paragraphs

HTML = """<html><head><title>No</title><style>p { color: red of the prose and more }</style></head><body>
<div class="navheader"><p>A menu of many words that lead to another page.</p></div>
<ul><li><a href="x">A long link to some other page of this book</a></li></ul>
<h1>Opening files<a class="headerlink" href="#x">¶</a></h1>
<p>The function <code>open</code> returns a file, &amp; it is <em>your</em> task to close it.
<pre>with open(name) as f: this is code and not a paragraph of prose</pre>
<p>An unclosed paragraph ends where
the next one begins.<p>The last of them is here, after it.
<h2>Empty section</h2><h2>-v</h2>
<p>$ a = 1 + 2 * 3 ; b = x[4] ; c = {5} the sum of it</p>
<table><tr><td>A cell with enough words to be a paragraph</td></tr></table>
</body></html>"""

PAGE = """<page xmlns="http://projectmallard.org/1.0/" id="x">
<info><desc>A summary that is not shown to anyone.</desc></info>
<title>Connect a printer</title><comment><p>We should write more about this some day.</p></comment>
<p>Press <gui>Add</gui> in the panel and choose <app>your printer</app> from the list.</p>
<steps><item><p>Turn the printer on, and wait for a minute.</p></item></steps>
<link type="guide" xref="y"/></page>"""

POD = """package Code; # this is code and not a paragraph of prose

=encoding utf8

=head1 Opening B<files>X<file>

Call C<< open >> or L<the other|perlfunc/open>, which is E<lt>newE<gt>, and C<I<never>> both.

    open(my $fh, "<", $name) # this is code and not prose

=over

=item * close

Gives back the handle that was opened before.

=back

=begin html

A paragraph that is meant for the web alone.

=end html

=cut

sub code { this is code and not a paragraph of prose }
"""

RST = """.. _label:
.. This comment has enough words to be a paragraph.

=============
Opening files
=============

The function :func:`open` returns a ``file``, as *the* :ref:`guide <label>` and `this page <http://x>`_ say::

    with open(name) as f: this is code and not prose

- A first entry of the list that goes on
  over two lines.
- A second entry, see |release| notes [1]_ of it.

.. code-block:: python

   print("a string with enough words to be a paragraph")

.. note:: A note is text that the reader should see,
   in its whole length.

.. function:: close(handle)

   Give back the handle that was opened before.

   :param handle: the file that was opened before it

=====  =====================================
flag   a table of words that is not prose
=====  =====================================

:Author: Somebody with a name of many words
"""


def found(suffix: str, content: str) -> list[Paragraph]:
    return paragraphs(READERS[suffix](content))


def test_html_gives_its_paragraphs_without_code_menus_and_tables() -> None:
    assert found("html", HTML) == [
        ("The function open returns a file, & it is your task to close it.", "Opening files"),
        ("An unclosed paragraph ends where the next one begins.", ""),
        ("The last of them is here, after it.", ""),
    ]


def test_mallard_gives_its_paragraphs_without_comments() -> None:
    assert found("page", PAGE) == [
        ("Press Add in the panel and choose your printer from the list.", "Connect a printer"),
        ("Turn the printer on, and wait for a minute.", ""),
    ]


def test_pod_gives_its_paragraphs_without_formatting_codes() -> None:
    assert found("pod", POD) == [
        ("Call open or the other, which is <new>, and never both.", "Opening files"),
        ("Gives back the handle that was opened before.", "close"),
    ]


def test_rst_gives_its_paragraphs_without_directives_and_marks() -> None:
    assert found("rst", RST) == [
        ("The function open returns a file, as the guide and this page say:", "Opening files"),
        ("A first entry of the list that goes on over two lines.", ""),
        ("A second entry, see release notes of it.", ""),
        ("A note is text that the reader should see, in its whole length.", ""),
        ("Give back the handle that was opened before.", ""),
    ]


def test_plain_text_gives_its_paragraphs() -> None:
    text = "A paragraph of five words or more,\nover two lines.\n\nToo short.\n\n------ a rule is no prose\n"
    assert found("txt", text) == [("A paragraph of five words or more, over two lines.", "")]


def test_unbalanced_marks_are_text() -> None:
    assert found("pod", "=pod\n\nAn open C<code that never ends is still text.")[0].text.startswith("An open")
    assert found("html", "<p>A paragraph before <pre>the code that never ends, and more") == []
    assert found("html", "</p></p><p>A paragraph after the tags that close nothing.")[0].text
    assert found("rst", "A *star and a `tick that never end in it.")[0].text.endswith("in it.")
    assert found("pod", "=pod\n\nThe number E<999999999999> is no letter at all.")[0].text.startswith("The")
