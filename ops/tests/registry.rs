//! Every operation of the registry, on all its cases and on drawn ones.

use ops::case::Draw;
use ops::check::{Report, check, check_case};
use ops::registry::OPS;
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
            report.exact_error,
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
