"""Text ↔ ids: the kinds of vocabulary, behind one interface."""
