//! What the tape promises: gradients that add up, and nothing lost in silence.

use autograd::{
    Error, Gradients, InputGrads, MultiplyAdds, ParamId, Parameters, ParametersBuilder, Profile, Result, Rule, Tape,
    Var, Work, rule_fields,
};
use std::sync::Arc;
use tensor::{DType, Shape, Tensor};

/// a·b, element by element; the simplest operation with two inputs.
fn times<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    let (x, y) = (a.value().to_vec::<f64>()?, b.value().to_vec::<f64>()?);
    let product: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
    let rule = || Times { a: a.value().clone(), b: b.value().clone() };
    a.tape().record("times", &[a, b], Tensor::from_slice(&product, a.shape())?, rule)
}

struct Times {
    a: Tensor,
    b: Tensor,
}

impl Rule for Times {
    rule_fields!("times", a, b);

    fn backward(self: Box<Self>, upstream: Tensor, grads: &mut InputGrads<'_, '_>) -> Result<()> {
        // Both open at once, as a fused kernel has them.
        let (mut da, mut db) = (grads.open(0)?, grads.open(1)?);
        let upstream = upstream.as_slice::<f64>("times")?;
        for (slot, other) in [(&mut da, &self.b), (&mut db, &self.a)] {
            let other = other.to_vec::<f64>()?;
            if let Some(mut out) = slot.out::<f64>()? {
                out.put(&upstream.iter().zip(&other).map(|(u, o)| u * o).collect::<Vec<_>>());
            }
        }
        grads.close(da);
        grads.close(db);
        Ok(())
    }

    fn multiply_adds(&self, value: &Shape) -> MultiplyAdds {
        MultiplyAdds::product(value.count())
    }
}

fn vector(values: &[f64]) -> Tensor {
    Tensor::from_slice(values, [values.len()]).unwrap()
}

/// Parameters p (2) and q (3).
fn parameters() -> (Parameters, ParamId, ParamId) {
    let mut builder = ParametersBuilder::default();
    let p = builder.add("p", [2], vec![2.0, 3.0]);
    let q = builder.add("q", [3], vec![1.0; 3]);
    (builder.build(DType::F64).unwrap(), p, q)
}

/// One pass over x·p, from the gradient (1, 1).
fn pass(parameters: &Parameters, p: ParamId, x: &[f64], gradients: &mut Gradients) {
    let tape = Tape::new();
    let y = times(&tape.constant(vector(x)), &tape.parameter(parameters, p)).unwrap();
    tape.backward_from(&y, vector(&[1.0, 1.0]), gradients).unwrap();
}

fn of(gradients: &Gradients, id: ParamId) -> Vec<f64> {
    gradients.parameter(id).unwrap().to_vec().unwrap()
}

#[test]
fn micro_batches_add_up_until_the_next_step_begins() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    gradients.begin_step();
    pass(&parameters, p, &[5.0, 7.0], &mut gradients);
    assert_eq!(of(&gradients, p), [5.0, 7.0]);
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [6.0, 9.0]);
    gradients.begin_step();
    assert!(gradients.parameter(p).is_none());
    pass(&parameters, p, &[1.0, 2.0], &mut gradients);
    assert_eq!(of(&gradients, p), [1.0, 2.0], "stored, not added to the last step's");
}

#[test]
fn a_parameter_at_several_places_collects_all_its_gradients() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    // p·p, with p recorded once and twice: twice an input of one operation, and two nodes.
    for nodes in [1, 2] {
        let tape = Tape::new();
        let first = tape.parameter(&parameters, p);
        let second = if nodes == 1 { first.clone() } else { tape.parameter(&parameters, p) };
        let y = times(&times(&first, &second).unwrap(), &first).unwrap();
        gradients.begin_step();
        tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap();
        assert_eq!(of(&gradients, p), [12.0, 27.0], "3p², {nodes} nodes");
    }
}

#[test]
fn inputs_and_constants() {
    let tape = Tape::new();
    let (x, c) = (tape.input(vector(&[2.0])), tape.constant(vector(&[5.0])));
    let y = times(&times(&x, &x).unwrap(), &c).unwrap();
    let mut gradients = Gradients::default();
    tape.backward(&y, &mut gradients).unwrap();
    assert_eq!(gradients.of(&x).unwrap().to_vec::<f64>().unwrap(), [20.0]);
    assert!(gradients.of(&c).is_none());
    assert!(tape.to_string().contains("times"), "{tape}");
    assert_eq!(tape.saved_bytes(), 0, "freed on the way");
}

#[test]
fn an_inference_tape_records_nothing() {
    let tape = Tape::inference();
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    assert!(tape.nodes().is_empty() && y.node().is_none());
    let error = tape.backward(&y, &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::NotRecorded);
    assert!(error.to_string().contains("Tape::new records"), "{error}");
}

#[test]
fn a_bare_parameter_is_no_result() {
    let (parameters, p, _) = parameters();
    let tape = Tape::new();
    let y = tape.parameter(&parameters, p);
    let mut gradients = Gradients::new(&parameters).unwrap();
    let error = tape.backward_from(&y, vector(&[1.0, 1.0]), &mut gradients).unwrap_err();
    assert_eq!(error, Error::BareParameter);
    assert!(error.to_string().contains("a parameter itself"), "{error}");
}

#[test]
fn an_input_of_another_tape_has_no_gradient() {
    let mut gradients = Gradients::default();
    let differentiate = |gradients: &mut Gradients, tape: &Tape| {
        let x = tape.input(vector(&[2.0]));
        tape.backward(&times(&x, &x).unwrap(), gradients).unwrap();
    };
    let (first, second) = (Tape::new(), Tape::new());
    let x = first.input(vector(&[7.0]));
    differentiate(&mut gradients, &second);
    assert!(gradients.of(&x).is_none(), "the same line of another tape");
    // Nor has one of a tape that is gone, where the next one may lie in its place.
    differentiate(&mut gradients, &Tape::new());
    assert!(gradients.of(&Tape::new().input(vector(&[7.0]))).is_none());
}

#[test]
fn a_value_of_another_tape_is_refused() {
    let (one, two) = (Tape::new(), Tape::new());
    let (a, b) = (one.input(vector(&[1.0])), two.input(vector(&[1.0])));
    assert!(matches!(times(&a, &b).unwrap_err(), Error::ForeignVar { op: "times" }));
    let y = times(&a, &a).unwrap();
    assert!(matches!(two.backward(&y, &mut Gradients::default()).unwrap_err(), Error::ForeignVar { .. }));
}

#[test]
fn a_tape_is_walked_once() {
    let tape = Tape::new();
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    tape.backward(&y, &mut Gradients::default()).unwrap();
    let error = tape.backward(&y, &mut Gradients::default()).unwrap_err();
    assert_eq!(error, Error::Walked { op: "times" });
    assert!(error.to_string().contains("walked already"), "{error}");
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
        assert!(gradients.require_all().unwrap_err().to_string().contains("p, q"));
    }
}

#[test]
#[should_panic(expected = "an operation and its rule have one name")]
fn an_operation_has_its_rules_name() {
    let tape = Tape::new();
    let x = tape.input(vector(&[1.0]));
    let _ = tape.record("taken", &[&x], vector(&[1.0]), || Given(|_: &mut InputGrads<'_, '_>| Ok(())));
}

#[test]
fn gradients_can_be_changed_before_the_optimiser_sees_them() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    pass(&parameters, p, &[5.0, 7.0], &mut gradients);
    gradients.flat_mut::<f64>().unwrap().unwrap()[parameters.layout().span(p)].fill(4.0);
    assert_eq!(of(&gradients, p), [4.0, 4.0]);
    let view = gradients.parameter(p);
    assert!(matches!(gradients.flat_mut::<f64>(), Err(Error::Tensor(tensor::Error::Shared { .. }))));
    drop(view);
    assert!(Gradients::default().flat_mut::<f64>().unwrap().is_none());
}

#[test]
fn parameters_that_the_loss_does_not_depend_on_are_named() {
    let (parameters, p, _) = parameters();
    let mut gradients = Gradients::new(&parameters).unwrap();
    pass(&parameters, p, &[1.0, 1.0], &mut gradients);
    assert_eq!(gradients.require_all().unwrap_err(), Error::Unreached { names: vec!["q".into()] });
}

#[test]
fn gradients_of_another_model_are_refused() {
    let (own, p, _) = parameters();
    let backward = |in_pieces: bool, gradients: &mut Gradients| {
        let tape = Tape::new();
        let y = match in_pieces {
            true => {
                let x = tape.constant(Tensor::full([2, 2], 1.0));
                let times_p = tape.in_pieces(&x, 1, |x, _| Ok((times(x, &x.tape().parameter(&own, p))?, ())));
                times_p.map(|(y, _): (_, Vec<()>)| y)
            }
            false => times(&tape.constant(vector(&[1.0, 1.0])), &tape.parameter(&own, p)),
        }?;
        tape.backward_from(&y, Tensor::full(y.shape().clone(), 1.0), gradients)
    };
    let model = |names: [&str; 2], extents: [usize; 2], dtype: DType| {
        let mut builder = ParametersBuilder::default();
        names.into_iter().zip(extents).for_each(|(name, extent)| _ = builder.add(name, [extent], vec![0.0; extent]));
        Gradients::new(&builder.build(dtype).unwrap()).unwrap()
    };
    for in_pieces in [false, true] {
        let others = [
            Gradients::default(),
            model(["p", "q"], [7, 3], DType::F64),
            model(["p", "q"], [2, 3], DType::F32),
            model(["other", "q"], [2, 3], DType::F64),
        ];
        for mut other in others {
            let error = backward(in_pieces, &mut other).unwrap_err();
            assert!(matches!(error, Error::ForeignGradients { .. }), "{error}");
        }
        backward(in_pieces, &mut model(["p", "q"], [2, 3], DType::F64)).unwrap();
    }
}

/// A teacher and its student are laid out alike: without an error, one's gradients would be added to the other's.
#[test]
fn parameters_of_two_models_do_not_meet_on_a_tape() {
    let (student, p, _) = parameters();
    for teacher in [parameters().0, student.duplicate().unwrap()] {
        let backward = |first: &Parameters, second: &Parameters, in_pieces: bool| {
            let tape = Tape::new();
            let x = tape.constant(Tensor::full([2, 2], 1.0));
            let y = match in_pieces {
                true => {
                    let model = |samples: std::ops::Range<usize>| if samples.start == 0 { first } else { second };
                    let product =
                        tape.in_pieces(&x, 1, |x, samples| Ok((times(x, &x.tape().parameter(model(samples), p))?, ())));
                    product.map(|(y, _): (_, Vec<()>)| y)
                }
                false => {
                    let x = tape.constant(vector(&[1.0, 1.0]));
                    times(&times(&x, &tape.parameter(first, p))?, &tape.parameter(second, p))
                }
            }?;
            tape.backward_from(&y, Tensor::full(y.shape().clone(), 1.0), &mut Gradients::new(&student)?)
        };
        for in_pieces in [false, true] {
            assert_eq!(backward(&student, &teacher, in_pieces), Err(Error::TwoModels));
            assert_eq!(backward(&teacher, &student, in_pieces), Err(Error::TwoModels));
            // The same model twice, also rounded or shared, is one.
            backward(&student, &student.share(), in_pieces).unwrap();
            backward(&student, &student.cast(DType::F64).unwrap(), in_pieces).unwrap();
        }
    }
}

#[test]
fn parameters_are_not_written_while_somebody_looks_at_them() {
    let (mut parameters, p, _) = parameters();
    let view = parameters.get(p);
    let error = parameters.flat_mut::<f64>().unwrap_err();
    assert!(matches!(error, Error::Tensor(tensor::Error::Shared { .. })), "{error}");
    drop(view);
    parameters.flat_mut::<f64>().unwrap()[0] = 9.0;
    assert_eq!(parameters.get(p).to_vec::<f64>().unwrap(), [9.0, 3.0]);
}

#[test]
fn the_first_value_that_is_not_finite_is_named() {
    let tape = Tape::checking_finite();
    let x = tape.input(vector(&[1e200]));
    let y = times(&x, &x).unwrap_err();
    assert_eq!(y, Error::NotFinite { op: "times", node: 1 });
}

#[test]
fn a_profile_counts_what_is_recorded_and_what_is_walked() {
    let profile = Arc::<Profile>::default();
    let tape = Tape::new().profiled(Some(profile.clone()));
    let (x, c) = (tape.input(vector(&[2.0, 3.0])), tape.constant(vector(&[5.0, 7.0])));
    let y = times(&times(&x, &x).unwrap(), &c).unwrap();
    profile.lap("rest");
    tape.backward_from(&y, vector(&[1.0, 1.0]), &mut Gradients::default()).unwrap();
    let lines = profile.lines();
    let counts: Vec<_> = lines.iter().map(|l| (l.name, l.work, l.calls, l.multiply_adds, l.bytes)).collect();
    let expected = [
        ("times", Work::Forward, 2, 4, 2 * 3 * 16),
        ("rest", Work::Other, 1, 0, 0),
        // Of the constant there is no gradient: upstream, two saved factors, and one gradient or two.
        ("times", Work::Backward, 2, 2 + 4, (4 + 5) * 16),
    ];
    assert_eq!(counts, expected);

    profile.restart();
    let tape = Tape::inference().profiled(Some(profile.clone()));
    let x = tape.input(vector(&[2.0]));
    let y = times(&x, &x).unwrap();
    assert!(tape.nodes().is_empty() && y.node().is_none(), "watched, it still records nothing");
    assert_eq!(profile.lines()[0].multiply_adds, 1);
}

#[test]
fn an_upstream_gradient_that_is_not_like_the_value_is_refused() {
    let tape = Tape::new();
    let x = tape.input(vector(&[2.0, 3.0]));
    let y = times(&x, &x).unwrap();
    let refused = |upstream: Tensor| tape.backward_from(&y, upstream, &mut Gradients::default()).unwrap_err();
    let error = refused(vector(&[1.0]));
    assert!(matches!(error, Error::Tensor(tensor::Error::Shape { op: "backward", .. })), "{error}");
    let error = refused(vector(&[1.0, 1.0]).cast(DType::F32).unwrap());
    assert_eq!(error.to_string(), "backward: expected the value's own type of elements, got f32");
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
