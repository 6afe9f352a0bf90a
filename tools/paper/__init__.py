"""Tables and a figure of papers, measured again; ``README.md`` here lists them."""
