"""`twinpool lab tune`: docs/tuning.md, whose tables come from arithmetic, the simulator and a measured run."""
