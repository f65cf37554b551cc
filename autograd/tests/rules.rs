//! What is asked of a backward rule.

mod support;

use autograd::{Error, Gradients, InputGrads, Result, Rule, Tape, rule_fields};
use std::panic::{AssertUnwindSafe, catch_unwind};
use support::{of, parameters, pass, times, vector};
use tensor::{DType, Tensor};

/// As after an error: what it did not come to is missing.
#[test]
fn a_rule_that_panics_leaves_no_gradients() {
    let (mut parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    pass(&parameters, p, &[5.0, 7.0], &mut gradients); // an earlier micro-batch
    {
        let tape = Tape::new();
        let w = tape.parameter(&parameters, p);
        let branch = tape
            .record("given", &[&w], vector(&[1.0, 1.0]), || Given(|_: &mut InputGrads<'_, '_>| panic!("its fault")));
        let sum = times(&branch.unwrap(), &w).unwrap();
        let walk = || tape.backward_from(&sum, vector(&[1.0, 1.0]), &mut gradients);
        assert!(catch_unwind(AssertUnwindSafe(walk)).is_err());
    }
    assert!(gradients.parameter(p).is_none());
    pass(&parameters, p, &[2.0, 3.0], &mut gradients);
    assert_eq!(gradients.parameter(p).unwrap().to_vec::<f64>().unwrap(), [2.0, 3.0]);
    parameters.set(p, &vector(&[1.0, 1.0])).unwrap();
}

#[test]
fn a_rule_that_forgets_an_input_is_an_error() {
    struct Forgetful;
    impl Rule for Forgetful {
        rule_fields!("forgetful");
        fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
            grads.give(0, upstream)
        }
    }
    let tape = Tape::new();
    let (a, b) = (tape.input(vector(&[1.0])), tape.input(vector(&[1.0])));
    let y = tape.record("forgetful", &[&a, &b], vector(&[1.0]), || Forgetful).unwrap();
    let error = tape.backward(&y, &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::MissingGradient { op: "forgetful", input: 1 });
}

/// A rule that does with its one input what it was given.
struct Given<F>(F);

impl<F> Rule for Given<F>
where
    F: FnOnce(&mut InputGrads<'_, '_>) -> Result<()> + Send + 'static,
{
    rule_fields!("given");
    fn backward(self: Box<Self>, _: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        (self.0)(grads)
    }
}

/// Memory that nobody wrote to, or in which a rule stopped halfway, does not pass for a gradient.
#[test]
fn a_rule_that_writes_nothing_or_fails_leaves_no_gradients() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    type Work = fn(&mut InputGrads<'_, '_>) -> Result<()>;
    let unwritten: Work = |grads| {
        let slot = grads.open(0)?;
        grads.close(slot);
        Ok(())
    };
    let left_open: Work = |grads| {
        grads.open(0)?.out::<f64>()?.into_iter().for_each(|out| out.data.fill(1.0));
        Ok(())
    };
    let failed: Work = |grads| {
        grads.open(0)?.out::<f64>()?.into_iter().for_each(|out| out.data.fill(1.0));
        Err(Error::NotRecorded)
    };
    // An input that there is not, such as no bias, may be written to: nobody wants it.
    let another: Work = |grads| {
        let slot = grads.open(1)?;
        grads.close(slot);
        grads.give(2, vector(&[1.0]))
    };
    // What is given later is the first contribution, not added to what the memory held.
    let closed_then_given: Work = |grads| {
        let slot = grads.open(0)?;
        grads.close(slot);
        grads.give(0, vector(&[3.0, 4.0]))
    };
    tensor::set_poison(true);
    let tape = Tape::new();
    let x = tape.input(vector(&[1.0, 1.0]));
    let y = tape.record("given", &[&x], vector(&[1.0, 1.0]), || Given(closed_then_given)).unwrap();
    tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [3.0, 4.0]);
    // The same value twice, and both open at once.
    let two_open: Work = |grads| {
        let (first, second) = (grads.open(0)?, grads.open(1)?);
        grads.close(first);
        grads.close(second);
        Ok(())
    };
    let one_of_two: Work = |grads| {
        let (mut first, second) = (grads.open(0)?, grads.open(1)?);
        first.out::<f64>()?.into_iter().for_each(|out| out.data.fill(1.0));
        grads.close(first);
        grads.close(second);
        Ok(())
    };
    for (work, input) in [(two_open, 0), (one_of_two, 1)] {
        let y = tape.record("given", &[&x, &x], vector(&[1.0, 1.0]), || Given(work)).unwrap();
        let error = tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap_err();
        assert_eq!(error, Error::MissingGradient { op: "given", input });
    }
    // But what was there before stays, and what is given is added to it.
    let y = tape.record("given", &[&x], vector(&[1.0, 1.0]), || Given(closed_then_given)).unwrap();
    let z = times(&y, &x).unwrap();
    tape.backward_from(&z, vector(&[1.0, 1.0]), &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [4.0, 5.0]);
    // Nor does a parameter, to which nothing but this rule leads.
    let y = tape.record("given", &[&tape.parameter(&parameters, p)], vector(&[1.0, 1.0]), || Given(unwritten)).unwrap();
    assert!(tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).is_err());
    assert!(gradients.parameter(p).is_none());
    let missing = Error::MissingGradient { op: "given", input: 0 };
    for (work, expected) in
        [(unwritten, missing.clone()), (left_open, missing.clone()), (another, missing), (failed, Error::NotRecorded)]
    {
        pass(&parameters, p, &[5.0, 7.0], &mut gradients); // an earlier micro-batch
        let tape = Tape::new();
        let (x, w) = (tape.input(vector(&[1.0, 1.0])), tape.parameter(&parameters, p));
        let of_input = times(&x, &w).unwrap();
        let y = tape.record("given", &[&of_input], vector(&[1.0, 1.0]), || Given(work)).unwrap();
        let sum = times(&y, &w).unwrap();
        let error = tape.backward_from(&sum, vector(&[1.0, 1.0]), &mut gradients).unwrap_err();
        assert_eq!(error, expected);
        assert!(gradients.parameter(p).is_none() && gradients.of(&x).is_none());
        assert_eq!(gradients.require_all(), Err(Error::NoBackward));
    }
}

/// Its backward pass walks a tape of its own.
#[test]
fn a_rule_that_fails_within_a_segment_is_an_error() {
    let tape = Tape::recomputing_segments();
    let fails = |_: &mut InputGrads<'_, '_>| Err(Error::NotRecorded);
    let (y, ()) = tape
        .segment([tape.input(vector(&[1.0]))], move |tape, [x]| {
            Ok::<_, Error>((tape.record("given", &[&x], vector(&[1.0]), || Given(fails))?, ()))
        })
        .unwrap();
    assert_eq!(tape.backward(&y, &mut Gradients::default()), Err(Error::NotRecorded));
}

#[test]
#[should_panic(expected = "an operation and its rule have one name")]
fn an_operation_has_its_rules_name() {
    let tape = Tape::new();
    let x = tape.input(vector(&[1.0]));
    let _ = tape.record("taken", &[&x], vector(&[1.0]), || Given(|_: &mut InputGrads<'_, '_>| Ok(())));
}

/// The layout's type is that of the gradients, and a kernel writes its own.
#[test]
fn a_kernel_of_another_type_than_the_gradients_is_refused() {
    struct Ones;
    impl Rule for Ones {
        rule_fields!("ones");
        fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
            let mut slot = grads.open(0)?;
            match upstream.dtype() {
                DType::F32 => slot.out::<f32>()?.into_iter().for_each(|out| out.data.fill(1.0)),
                _ => slot.out::<f64>()?.into_iter().for_each(|out| out.data.fill(1.0)),
            }
            grads.close(slot);
            Ok(())
        }
    }
    let (parameters, p, _) = parameters();
    for dtype in [DType::F64, DType::F32] {
        let (parameters, mut gradients) = (parameters.cast(dtype).unwrap(), Gradients::new(&parameters).unwrap());
        let tape = Tape::new();
        let x = tape.parameter(&parameters, p);
        let y = tape.record("ones", &[&x], x.value().clone(), || Ones).unwrap();
        let upstream = vector(&[1.0, 1.0]).cast(dtype).unwrap();
        let walked = tape.backward_from(&y, upstream, &mut gradients);
        match (dtype, walked) {
            (DType::F64, walked) => {
                walked.unwrap();
                assert_eq!(of(&gradients, p), [1.0, 1.0]);
            }
            (_, walked) => {
                let error = walked.unwrap_err();
                assert!(matches!(error, Error::Tensor(tensor::Error::DType { op: "backward", .. })), "{error}");
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_like_its_input_is_refused() {
    type Work = fn(&mut InputGrads<'_, '_>) -> Result<()>;
    let short: Work = |grads| grads.give(0, vector(&[1.0]));
    let narrow: Work = |grads| grads.give(0, vector(&[1.0, 1.0]).cast(DType::F32)?);
    let error = |work| {
        let tape = Tape::new();
        let x = tape.input(vector(&[1.0, 1.0]));
        let y = tape.record("given", &[&x], vector(&[1.0, 1.0]), || Given(work)).unwrap();
        tape.backward_from(&y, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap_err()
    };
    assert!(matches!(error(short), Error::Tensor(tensor::Error::Shape { op: "given", .. })), "{}", error(short));
    assert!(matches!(error(narrow), Error::Tensor(tensor::Error::DType { op: "given", .. })), "{}", error(narrow));
}
