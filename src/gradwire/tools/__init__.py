"""Everything behind the `gradwire` command. The library never imports it."""
