"""Gates: what a patch and a release have to prove, each a module or package with one measurement."""
