//! Segments: what runs twice gives the gradients that running once would give.

mod support;

use autograd::{Error, Gradients, InputGrads, ParametersBuilder, Profile, Recompute, Result, Rule, Tape, Work};
use std::cell::Cell;
use std::sync::Arc;
use support::{of, parameters, times, vector};
use tensor::{DType, Tensor};

/// Two sums of three terms differ in their last bits with the order: the inner uses of x must come in the place
/// that they have on one long tape.
#[test]
fn the_order_of_additions_is_that_of_one_long_tape() {
    let gradient = |tape: Tape| {
        let x = tape.input(vector(&[0.1, 1.3]));
        let (y, seen) = tape
            .segment([x.clone()], move |_, [x]| {
                let square = times(&x, &x)?;
                Ok::<_, Error>((times(&square, &x)?, x.into_value()))
            })
            .unwrap();
        assert!(seen.is_same_view(x.value()), "what the first run returns beside its value");
        let z = times(&times(&y, &x).unwrap(), &x).unwrap();
        let mut gradients = Gradients::default();
        tape.backward_from(&z, vector(&[0.7, 1.1]), &mut gradients).unwrap();
        gradients.of(&x).unwrap().to_vec::<f64>().unwrap()
    };
    let (one, two) = (gradient(Tape::new()), gradient(Tape::recomputing_segments()));
    assert_eq!(one, two);
    assert!((one[0] - 5.0 * 0.1f64.powi(4) * 0.7).abs() < 1e-15, "{one:?}");
}

#[test]
fn a_segment_keeps_its_inputs_and_reaches_its_parameters() {
    let mut builder = ParametersBuilder::default();
    let p = builder.add("p", [2], vec![2.0, 3.0]);
    let parameters = builder.build(DType::F64).unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    let tape = Tape::recomputing_segments();
    let x = tape.constant(vector(&[5.0, 7.0])); // no input needs a gradient, but p does
    let shared = parameters.share();
    let (y, ()) = tape
        .segment([x.clone()], move |tape, [x]| {
            let p = tape.parameter(&shared, p);
            Ok::<_, Error>((times(&times(&x, &p)?, &p)?, ()))
        })
        .unwrap();
    assert_eq!(tape.nodes().iter().map(|node| node.name()).collect::<Vec<_>>(), ["segment"]);
    assert_eq!(tape.saved_bytes(), x.value().bytes());
    tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap();
    assert_eq!(gradients.parameter(p).unwrap().to_vec::<f64>().unwrap(), [20.0, 42.0]); // 2·x·p
}

/// These are met on tapes of their own.
#[test]
fn a_segment_reaches_the_parameters_of_its_pieces() {
    let (parameters, p, _) = parameters();
    let (tape, shared) = (Tape::recomputing_segments(), parameters.share());
    let (y, ()) = tape
        .segment([tape.constant(Tensor::full([2, 2], 5.0))], move |tape, [x]| {
            let (y, _) =
                tape.in_pieces(&x, 1, |x, _| Ok::<_, Error>((times(x, &x.tape().parameter(&shared, p))?, ())))?;
            Ok::<_, Error>((y, ()))
        })
        .unwrap();
    let mut gradients = Gradients::new(&parameters).unwrap();
    tape.backward_from(&y, Tensor::full([2, 2], 1.0), &mut gradients).unwrap();
    assert_eq!(of(&gradients, p), [10.0, 10.0]);
}

#[test]
fn a_segment_may_give_back_its_input_take_one_twice_and_ignore_one() {
    let tape = Tape::recomputing_segments();
    let [x, ignored] = [[2.0], [3.0]].map(|values| tape.input(vector(&values)));
    let (same, ()) = tape.segment([x.clone(), ignored.clone()], |_, [x, _]| Ok::<_, Error>((x, ()))).unwrap();
    let (y, ()) = tape.segment([same.clone(), same], |_, [a, b]| Ok::<_, Error>((times(&a, &b)?, ()))).unwrap();
    let mut gradients = Gradients::default();
    tape.backward_from(&y, vector(&[1.0]), &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [4.0]);
    assert!(gradients.of(&ignored).is_none());
}

#[test]
fn a_segment_that_does_something_else_the_second_time_is_an_error() {
    let runs = Cell::new(0);
    let tape = Tape::recomputing_segments();
    let x = tape.input(vector(&[2.0, 3.0]));
    let (y, ()) = tape
        .segment([x], move |_, [x]| {
            if runs.replace(1) > 0 {
                return Err(Error::NotFinite { op: "the second run", node: 0 });
            }
            Ok((times(&x, &x)?, ()))
        })
        .unwrap();
    let error = tape.backward_from(&y, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::NotFinite { op: "the second run", node: 0 });

    let runs = Cell::new(0);
    let tape = Tape::recomputing_segments();
    let x = tape.input(vector(&[2.0, 3.0]));
    let (y, ()) = tape
        .segment([x], move |tape, [x]| {
            let other = if runs.replace(1) > 0 { tape.constant(vector(&[1.0])) } else { x.clone() };
            Ok::<_, Error>((times(&other, &other)?, ()))
        })
        .unwrap();
    let error = tape.backward_from(&y, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap_err();
    assert!(matches!(&error, Error::Recompute { .. }), "{error}");
}

/// Two results share a value, which the walk from the first consumes.
#[test]
fn a_value_that_an_earlier_walk_consumed_is_not_passed_over() {
    for tape in [Tape::new(), Tape::recomputing_cheap(), Tape::recomputing_segments()] {
        let [x, p, q] = [2.0, 3.0, 5.0].map(|x| tape.input(vector(&[x])));
        let shared = times(&x, &x).unwrap();
        let [y, z] = [times(&shared, &p).unwrap(), times(&shared, &q).unwrap()];
        let mut gradients = Gradients::default();
        tape.backward(&y, &mut gradients).unwrap();
        assert_eq!(tape.backward(&z, &mut gradients).unwrap_err(), Error::Walked { op: "times" });
    }
}

/// What a segment does is listed as if it stood on the tape: forward twice, backward once.
#[test]
fn a_profile_sees_what_segments_do() {
    let profile = Arc::new(Profile::default());
    let tape = Tape::recomputing_segments().profiled(Some(Arc::clone(&profile)));
    let x = tape.input(vector(&[2.0]));
    let (y, ()) = tape.segment([x], |_, [x]| Ok::<_, Error>((times(&x, &x)?, ()))).unwrap();
    tape.backward(&y, &mut Gradients::default()).unwrap();
    let calls = |work| profile.lines().iter().find(|line| (line.name, line.work) == ("times", work)).map(|l| l.calls);
    assert_eq!((calls(Work::Forward), calls(Work::Backward)), (Some(2), Some(1)));
    let of_segment: Vec<u64> =
        profile.lines().iter().filter(|line| line.name == "segment").map(|line| line.bytes).collect();
    assert_eq!(of_segment, [0], "what it reads and writes is counted where it does");
}

/// Operations whose recomputation forgets its shape, or is offered only at first.
#[test]
fn a_value_that_is_recomputed_otherwise_or_not_at_all_is_an_error() {
    struct Forgetful {
        offers: Cell<usize>,
        again: Tensor,
    }
    impl Rule for Forgetful {
        fn name(&self) -> &'static str {
            "forgetful"
        }
        fn saved(&self) -> Vec<(&'static str, &Tensor)> {
            vec![]
        }
        fn saved_mut(&mut self) -> Vec<&mut Tensor> {
            vec![]
        }
        fn recompute(&self) -> Option<Recompute<'_>> {
            self.offers.set(self.offers.get().checked_sub(1)?);
            Some(Box::new(|| Ok(self.again.clone())))
        }
        fn backward(self: Box<Self>, dy: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
            grads.give(0, dy)
        }
    }
    // It is asked once for each of the two values that z saves.
    let single = Tensor::from_slice(&[1.0f32, 2.0], [2]).unwrap();
    for (offers, again, expected) in [
        (9, vector(&[1.0]), "gave f64 (1) instead of f64 (2)"),
        (9, single, "gave f32 (2) instead of f64 (2)"),
        (2, vector(&[1.0, 2.0]), "does not give its value again"),
    ] {
        let tape = Tape::recomputing_cheap();
        let x = tape.input(vector(&[1.0, 2.0]));
        let rule = || Forgetful { offers: Cell::new(offers), again };
        let y = tape.record("forgetful", &[&x], vector(&[1.0, 2.0]), rule).unwrap();
        let z = times(&y, &y).unwrap();
        drop(y);
        let error = tape.backward_from(&z, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap_err();
        let expected = format!("forgetful {expected}");
        assert!(matches!(&error, Error::Recompute { reason } if *reason == expected), "{error}");
    }
}
