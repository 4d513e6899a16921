"""Mutation run: how many small faults the tests see. ``python .ci/mutate.py --num 60 --seed 0 [FILES]``, from the root.

A mutant is the package with one operator, comparison, number, condition or sign changed, drawn at random from the
chosen files. It is killed if the tests of its folder fail or take too long. Survivors are printed with their lines.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path("numpyro_fspace")
#: Tests that a fault must fail, the quickest first; those named after the changed file come before all others.
TESTS = {
    "sgmcmc": "test_noise test_staged_potential statistical/test_level0_algebra statistical/test_contract "
    "test_control_variates test_gradient_noise statistical/test_level1_exact_law statistical/test_level1_functional "
    "test_kernels",
    "model/potential.py": "test_potential test_control_variates statistical/test_contract test_kernels test_driver",
    "model/site_transforms.py": "test_potential test_networks test_warmup test_report",
    "model/initial_values.py": "test_potential test_bad_inputs test_driver",
    "priors": "test_reprs test_priors test_pretrain test_helmholtz test_calibrated test_lapack test_pools "
    "test_properties test_bad_inputs",
    "metrics": "test_metrics test_langevin test_bad_inputs",
}
#: The tests of a mutant: those of the default tier first, because most mutants fail one of them.
TIERS = "not slow and not nightly", "slow and not nightly"
#: What pytest returns if it has selected no tests.
NO_TESTS = 5
SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutator(ast.NodeTransformer):
    """Changes the ``target``-th place that can be changed, and counts such places.

    Annotations, their imports and errors are none.
    """

    def __init__(self, target=-1):
        self.target, self.count, self.line, self.before = target, 0, 0, ""

    def _is_it(self, node):
        self.count += 1
        if self.count - 1 == self.target:
            self.line, self.before = node.lineno, ast.unparse(node)
        return self.count - 1 == self.target

    def visit(self, node):
        if isinstance(node, ast.Raise | ast.JoinedStr):
            return node
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.value = self.visit(node.value) if getattr(node, "value", None) else getattr(node, "value", None)
            return node
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        return super().visit(node)

    def visit_BinOp(self, node):
        is_type = isinstance(node.op, ast.BitOr)
        if not is_type and type(node.op) in SWAPS and self._is_it(node):
            node.op = SWAPS[type(node.op)]()
        return self.generic_visit(node)

    visit_BoolOp = visit_BinOp

    def visit_Compare(self, node):
        if self._is_it(node):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub | ast.Not) and self._is_it(node):
            return self.generic_visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            return ast.copy_location(ast.Constant(not node.value), node) if self._is_it(node) else node
        if isinstance(node.value, int | float) and self._is_it(node):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_If(self, node):
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return node
        if self._is_it(node):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            return node
        return self.generic_visit(node)


def places(path):
    mutator = Mutator()
    mutator.visit(ast.parse(path.read_text()))
    return [(path, number) for number in range(mutator.count)]


def mutate(path, number):
    """The source of a mutant, its line and what stood there."""
    mutator = Mutator(number)
    tree = ast.fix_missing_locations(mutator.visit(ast.parse(path.read_text())))
    return ast.unparse(tree), mutator.line, mutator.before


def tests_of(path):
    """The tests that a fault in a file of the package must fail, by the longest key of ``TESTS`` that names it."""
    name = path.relative_to(PACKAGE).as_posix()
    keys = [key for key in TESTS if name == key or name.startswith(f"{key}/")]
    return TESTS[max(keys, key=len)].split()


def fails(tier, tests, folder, timeout):
    """Whether one of the tests fails, or they take longer than ``timeout`` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", tier, *tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, NO_TESTS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="of the package; all that have tests here if none")
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the tests of a mutant in a tier")
    options = parser.parse_args()
    chosen = options.files or [f for key in TESTS for f in sorted((PACKAGE / key).rglob("*.py")) or [PACKAGE / key]]
    found = [place for path in chosen for place in places(path)]
    drawn = random.Random(options.seed).sample(found, min(options.num, len(found)))
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(".", copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__"))
        for count, (path, number) in enumerate(drawn, 1):
            source, line, before = mutate(path, number)
            (copy / path).write_text(source)
            own_first = sorted(tests_of(path), key=lambda name: path.stem not in name)
            tests = [f"tests/{name}.py" for name in own_first]
            is_killed = any(fails(tier, tests, copy, options.timeout) for tier in TIERS)
            shutil.copy(path, copy / path)
            killed += is_killed
            print(f"{killed}/{count} {'killed  ' if is_killed else 'SURVIVED'} {path}:{line}: {before}", flush=True)
    print(f"{killed} of {len(drawn)} mutants killed, drawn from {len(found)} places in {len(chosen)} files")


if __name__ == "__main__":
    main()
