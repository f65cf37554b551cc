//! Every operation of the registry, on all its cases and on drawn ones.

use autograd::exact::{Array, Scalar};
use autograd::gradcheck::Function;
use autograd::{InputGrads, Rule, Tape, Var, rule_fields};
use ops::case::{Case, Definition, Draw, uniform};
use ops::check::{Report, check, check_case};
use ops::registry::{self, OPS, Op};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use tensor::{DType, Tensor};

#[test]
fn every_operation_is_right_on_its_cases_and_every_mutant_is_caught() {
    tensor::set_poison(true);
    let mut failures = vec![];
    let table = documented_table();
    let mut rows: BTreeMap<&str, &str> = table.lines().map(|row| (row.split(' ').next().unwrap(), row)).collect();
    assert!(rows.len() > 3, "{table}");
    for report in reports() {
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
        assert!(report.checked > 0 && report.mutants > 0, "{} was not checked at all", report.op);
        if let Some(row) = rows.remove(report.op) {
            let shown: Vec<&str> = row.split_whitespace().collect();
            let counted = [report.cases, report.checked, report.skipped, report.laws].map(|count| count.to_string());
            assert_eq!([shown[1], shown[2], shown[3], shown[6]], counted.each_ref().map(String::as_str), "{row}");
            assert_eq!(shown[7], format!("{}/{}", report.killed, report.mutants), "{row}");
        }
        failures.extend(report.failures);
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(rows.is_empty(), "docs/checks.md shows what is not checked: {rows:?}");
}

/// Of all operations, in their order. Two are checked at a time, each by a thread of its own: laws have thread pools
/// of theirs.
fn reports() -> Vec<Report> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let work = || {
        while let Some(op) = OPS.get(next.fetch_add(1, Relaxed)) {
            let report = check(op);
            found.lock().unwrap().insert(op.name, report);
        }
    };
    std::thread::scope(|threads| _ = [threads.spawn(work), threads.spawn(work)]);
    let mut found = found.into_inner().unwrap();
    OPS.iter().map(|op| found.remove(op.name).unwrap()).collect()
}

/// The rows of `biformer gradcheck` that the documentation shows. Its rounding errors depend on the instruction set,
/// but its counts do not.
fn documented_table() -> String {
    let page = include_str!("../../docs/checks.md");
    let (_, after) = page.split_once("```text\noperation ").expect("a table of checks");
    let (table, _) = after.split_once("\n```").unwrap();
    table.lines().skip(1).collect::<Vec<_>>().join("\n")
}

/// tanh, whose rule does not see the sign of what it keeps.
struct Tanh {
    y: Tensor,
}

impl Rule for Tanh {
    rule_fields!("tanh", y);

    fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> autograd::Result<()> {
        let [dy, y] = [&dy, &self.y].map(|tensor| tensor.cast(DType::F64)?.to_vec::<f64>());
        let dx: Vec<f64> = dy?.iter().zip(&y?).map(|(dy, y)| dy * (1.0 - y * y)).collect();
        grads.give(0, Tensor::from_slice(&dx, self.y.shape().clone())?.cast(self.y.dtype())?)
    }
}

struct OfTanh;

impl Definition for OfTanh {
    fn apply<'t>(&self, x: &[Var<'t>]) -> autograd::Result<Var<'t>> {
        let y: Vec<f64> = x[0].value().cast(DType::F64)?.to_vec::<f64>()?.iter().map(|x| x.tanh()).collect();
        let y = Tensor::from_slice(&y, x[0].shape().clone())?.cast(x[0].dtype())?;
        x[0].tape().record("tanh", &[&x[0]], y.clone(), || Tanh { y })
    }
    fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
        let tanh = |x: S| S::of(1.0) - S::of(2.0) / ((x + x).exp() + S::of(1.0));
        Array { shape: x[0].shape.clone(), data: x[0].data.iter().map(|&x| tanh(x)).collect() }
    }
}

#[test]
fn a_rule_that_is_even_in_what_it_keeps_passes() {
    let cases = || vec![Case::new("a map", vec![uniform([2, 5], 1)], OfTanh)];
    let drawn = |draw: &Draw| Case::new("drawn", vec![uniform([draw.within(0, 1..=9)], 1)], OfTanh);
    let report = check(&Op { name: "tanh", summary: "", cases, drawn, kernels: None });
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
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
    let empty = || {
        let mut case = (registry::find("gelu").unwrap().cases)().remove(0);
        case.inputs = vec![Tensor::zeros([0, 3], DType::F64)];
        vec![case]
    };
    for cases in [Vec::new, empty as fn() -> Vec<Case>] {
        let report = check(&Op { name, summary, cases, drawn, kernels });
        assert!(!report.passed() && report.failures[0].contains("no cases"), "{report:?}");
    }
}

/// It trains in f32.
#[test]
fn an_operation_that_is_wrong_in_f32_alone_fails() {
    struct Doubled;
    impl Definition for Doubled {
        fn apply<'t>(&self, x: &[Var<'t>]) -> autograd::Result<Var<'t>> {
            ops::scale(&x[0], if x[0].dtype() == DType::F32 { 2.001 } else { 2.0 })
        }
        fn reference<S: Scalar>(&self, x: &[Array<S>]) -> Array<S> {
            Array::from_fn(&x[0].shape, |position| x[0].at(position) * S::of(2.0))
        }
    }
    let cases = || vec![Case::new("doubled", vec![uniform([3], 1)], Doubled)];
    let Op { summary, drawn, .. } = *registry::find("scale").unwrap();
    let report = check(&Op { name: "doubled", summary, cases, drawn, kernels: None });
    assert_eq!(report.failures.len(), 1, "{report:?}");
    assert!(report.failures[0].contains("f32 against f64: relative error 5.0e-4"), "{report:?}");
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
            let mut inputs = case.inputs.clone();
            inputs[input] = tensor.transposed().unwrap().contiguous().unwrap().transposed().unwrap();
            let tape = Tape::new();
            let inputs: Vec<Var<'_>> = inputs.into_iter().map(|input| tape.constant(input)).collect();
            case.apply(&inputs).is_ok()
        };
        (0..case.inputs.len()).any(takes)
    };
    let taking: Vec<&str> = OPS.iter().filter(|op| (op.cases)().iter().any(takes_a_view)).map(|op| op.name).collect();
    assert_eq!(taking, ["add", "contiguous", "drop_path", "dropout", "matmul", "mul", "permute", "slice"]);
}
