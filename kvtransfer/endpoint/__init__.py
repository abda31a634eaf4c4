"""The parts of a `RankEndpoint`: what it decides (`exporter`, `importer`) and what it does (`loop`, `copy_threads`)."""
