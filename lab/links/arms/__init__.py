"""Everything that copies blocks here: bare copies, links of twinpool, other libraries."""
