//! Every operation of the registry, on all its cases and on drawn ones.

use autograd::gradcheck::Function;
use autograd::{Tape, Var};
use ops::case::{Case, Draw};
use ops::check::{Report, check, check_case};
use ops::registry::{self, OPS, Op};
use proptest::prelude::*;

#[test]
fn every_operation_is_right_on_its_cases_and_every_mutant_is_caught() {
    tensor::set_poison(true);
    let mut failures = vec![];
    for op in OPS {
        let report = check(op);
        println!(
            "{:<16} cases {:>3}  checked {:>5}  skipped {:>7}  difference {:.1e}  exact {:.1e}  killed {}/{}",
            report.op,
            report.cases,
            report.checked,
            report.skipped,
            report.difference_error,
            report.dual_error,
            report.killed,
            report.mutants
        );
        assert!(report.checked > 0 && report.mutants > 0, "{} was not checked at all", op.name);
        failures.extend(report.failures);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_operation_is_right_on_drawn_cases(numbers in any::<[u8; 8]>()) {
        tensor::set_poison(true);
        for op in OPS {
            let case = (op.drawn)(&Draw { numbers });
            let mut report = Report { op: op.name, ..Report::default() };
            check_case(&case, &mut report);
            prop_assert!(report.passed(), "{numbers:?}: {}", report.failures.join("\n"));
        }
    }
}

/// Nothing to fail is nothing that passed.
#[test]
fn an_operation_without_cases_fails() {
    let Op { name, summary, drawn, kernels, .. } = *registry::find("gelu").unwrap();
    let report = check(&Op { name, summary, cases: Vec::new, drawn, kernels });
    assert!(!report.passed() && report.failures[0].contains("no cases"), "{report:?}");
}

/// Which operations take a tensor whose elements lie apart; all others refuse it, as it might be copied in secret.
/// (That both give the right bits, or the right error, is one of the laws.)
#[test]
fn the_operations_that_take_strided_views() {
    let takes_a_view = |case: &Case| {
        let takes = |input: usize| {
            let tensor = &case.inputs[input];
            let rank = tensor.rank();
            if rank < 2 || tensor.shape()[rank - 2..].contains(&1) || tensor.count() == 0 {
                return false;
            }
            let mut order: Vec<usize> = (0..rank).collect();
            order.swap(rank - 2, rank - 1);
            let view = tensor.permute(&order).unwrap().contiguous().unwrap().permute(&order).unwrap();
            let mut inputs = case.inputs.clone();
            inputs[input] = view;
            let tape = Tape::new();
            let inputs: Vec<Var<'_>> = inputs.into_iter().map(|input| tape.constant(input)).collect();
            case.apply(&inputs).is_ok()
        };
        (0..case.inputs.len()).any(takes)
    };
    let taking: Vec<&str> = OPS.iter().filter(|op| (op.cases)().iter().any(takes_a_view)).map(|op| op.name).collect();
    assert_eq!(taking, ["add", "contiguous", "drop_path", "dropout", "matmul", "mul", "permute", "slice"]);
}
